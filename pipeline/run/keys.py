"""The names of all objects of a run: no other module spells a key.

Keys are relative to the run's own root: a run is opened as the store `<store>/<run>`, so a run (or
a recorded set) can be copied elsewhere as a folder and stays readable.
"""

import re


def run_json() -> str:
    """The run description: resolved settings, inputs, geometry, versions."""
    return "run.json"


def removal() -> str:
    """Says that the run is being removed: nothing attaches to it any more."""
    return "removal.json"


def inputs() -> str:
    """Prefix of all staged inputs."""
    return "inputs/"


def input_file(sha256: str, name: str) -> str:
    """A staged input file."""
    return f"inputs/{sha256}/{name}"


def attempt(number: int) -> str:
    """Operational settings of one start of the run."""
    return f"attempts/{number:03d}.json"


def stop(number: int) -> str:
    """Ends an attempt: its workers exit with 0."""
    return f"attempts/{number:03d}.stop.json"


def attempts() -> str:
    """Prefix of all attempts."""
    return "attempts/"


def amendments() -> str:
    """Prefix of all amendments."""
    return "amendments/"


def amendment(number: int) -> str:
    """A change of the run's identity by a later attempt."""
    return f"amendments/{number:03d}.json"


def policies() -> str:
    """Prefix of all policies."""
    return "policies/"


def policy(version: int) -> str:
    """Commits a policy version."""
    return f"policies/{version:06d}/policy.json"


def policy_file(version: int, write_id: str, name: str) -> str:
    """A file of a policy version."""
    return f"policies/{version:06d}/{write_id}/{name}"


def steps() -> str:
    """Prefix of all steps."""
    return "steps/"


def step_prefix(step: int) -> str:
    """Prefix of a step's objects."""
    return f"steps/{step:06d}/"


def plan(step: int) -> str:
    """The plan of a step."""
    return step_prefix(step) + "plan.json"


def sub_plan(step: int, number: int) -> str:
    """A sub-plan of a step; the first one is its plan."""
    return step_prefix(step) + f"plan.{number:05d}.json" if number else plan(step)


_SUB_PLAN = re.compile(r"steps/(\d{6})/plan(?:\.(\d{5}))?\.json")


def sub_plan_number(key: str) -> int | None:
    """The number of the sub-plan with a key: 'steps/000003/plan.00002.json' -> 2; None: none."""
    match = _SUB_PLAN.fullmatch(key)
    if match is None or sub_plan(int(match[1]), int(match[2] or 0)) != key:
        return None
    return int(match[2] or 0)


def rollout(step: int, shard: int) -> str:
    """Commits one rollout shard."""
    return step_prefix(step) + f"rollout/{shard:05d}.json"


def rollout_file(step: int, shard: int, write_id: str, kind: str) -> str:
    """A data file of a rollout shard; kind is 'samples' or 'routes'."""
    return step_prefix(step) + f"rollout/{shard:05d}.{write_id}.{kind}.parquet"


def manifest(step: int) -> str:
    """Seals a step's samples and routes."""
    return step_prefix(step) + "manifest.json"


def manifest_rows(step: int, write_id: str) -> str:
    """The manifest's rows, one per sample."""
    return step_prefix(step) + f"manifest.{write_id}.parquet"


def replays(step: int) -> str:
    """Prefix of all objects that a step took from a recorded set."""
    return step_prefix(step) + "replay/"


def replayed(step: int, key: str) -> str:
    """The key, in a step sealed from a recorded set, of an object with this key in the set."""
    return replays(step) + key.removeprefix(step_prefix(step))


def trainings(step: int) -> str:
    """Prefix of all routes that the trainer recorded in a step."""
    return step_prefix(step) + "training/"


def training_set(step: int) -> str:
    """Names the one training set of a step: the commits of the routes that its trainer recorded."""
    return step_prefix(step) + "training.json"


def training(step: int, stage: int, dp_rank: int, set: str, cp_rank: int = 0) -> str:
    """Commits the R2 routes of one pipeline stage and data-parallel rank in a training set.

    Beyond the first, a context-parallel rank is a third number.
    """
    return _training_part(step, stage, dp_rank, set, cp_rank) + ".json"


def training_file(step: int, stage: int, dp_rank: int, set: str, cp_rank: int = 0) -> str:
    """The R2 routes of the same."""
    return _training_part(step, stage, dp_rank, set, cp_rank) + ".routes.parquet"


def _training_part(step: int, stage: int, dp_rank: int, set: str, cp_rank: int) -> str:
    cut = f"-{cp_rank:05d}" if cp_rank else ""
    return trainings(step) + f"{stage:03d}-{dp_rank:05d}{cut}.{set}"


def training_1_0(step: int, stage: int, dp_rank: int) -> str:
    """Commits R2 routes in trace format 1.0, which had no training sets."""
    return trainings(step) + f"{stage:03d}-{dp_rank:05d}.json"


def is_training(step: int, key: str) -> bool:
    """Whether a key is that of a training commit, or of its routes file, of a step."""
    return key.startswith(trainings(step)) and _TRAINING.fullmatch(key) is not None


def metrics(step: int) -> str:
    """The step's metrics: the last thing the trainer writes in a step."""
    return step_prefix(step) + "metrics.json"


def pruned(step: int) -> str:
    """Marks a sealed step whose samples and routes were removed to free space."""
    return step_prefix(step) + "pruned.json"


def checkpoints() -> str:
    """Prefix of all checkpoints."""
    return "checkpoints/"


def checkpoint(version: int) -> str:
    """Commits the training state of a policy version."""
    return f"checkpoints/{version:06d}/checkpoint.json"


def checkpoint_file(version: int, write_id: str, name: str) -> str:
    """A file of a checkpoint."""
    return f"checkpoints/{version:06d}/{write_id}/{name}"


def validations() -> str:
    """Prefix of all validations."""
    return "validations/"


def validation_plan(version: int) -> str:
    """The plan of a policy version's validation."""
    return f"validations/{version:06d}/plan.json"


def validation(version: int, shard: int) -> str:
    """Commits one shard of a validation."""
    return f"validations/{version:06d}/{shard:05d}.json"


def validation_file(version: int, shard: int, write_id: str) -> str:
    """The samples of one shard of a validation."""
    return f"validations/{version:06d}/{shard:05d}.{write_id}.samples.parquet"


def clocks() -> str:
    """Prefix of the objects that show the store's time."""
    return "clock/"


def clock(write_id: str) -> str:
    """An empty object, removed at once: its modification time is the store's time."""
    return clocks() + write_id


_NUMBERED = re.compile(r"/(\d{6})/[^/]+\.json$")


def number_of(key: str) -> int | None:
    """The step or version in the key of a commit object: 'steps/000003/plan.json' -> 3."""
    match = _NUMBERED.search("/" + key)
    return int(match.group(1)) if match else None


_ATTEMPT = re.compile(r"attempts/(\d{3,})\.json")


def attempt_number(key: str) -> int | None:
    """The number in the key of an attempt: 'attempts/002.json' -> 2; None: no attempt."""
    match = _ATTEMPT.fullmatch(key)
    return int(match.group(1)) if match else None


_SHARD = re.compile(r"(?:steps/\d{6}/rollout|validations/\d{6})/\d{5}\.json")


def commits_shard(key: str) -> bool:
    """Whether a key is that of a committed shard, of a step or of a validation."""
    return _SHARD.fullmatch(key) is not None


_FOLDER = re.compile(r"^[a-z]+/(\d{6})/")


def folder_number(key: str) -> int | None:
    """The step or version of the folder an object is in: 'policies/000003/aa/x' -> 3."""
    match = _FOLDER.match(key)
    return int(match.group(1)) if match else None


_MADE = re.compile(
    r"(steps/\d{6}/(?:rollout/)?[a-z\d-]+\.[0-9a-f]{8})\.(?:[a-z]+\.)?parquet"
    r"|(validations/\d{6}/\d{5}\.[0-9a-f]{8})\.samples\.parquet"
    r"|((?:policies|checkpoints)/\d{6}/[0-9a-f]{8})/[^/]+"
)
_TRAINING = re.compile(
    r"(steps/\d{6}/training/)\d{3}-\d{5}(?:-\d{5})?(\.[0-9a-f]{8})\.(?:json|routes\.parquet)"
)


def maker_of(key: str) -> str | None:
    """The part of a key that all objects of one write id share; None: not such an object.

    These are data files, and the commits of a training set, which count when `training_set` names
    them. Examples: 'steps/000003/rollout/00001.5f0c2a11.routes.parquet' ->
    'steps/000003/rollout/00001.5f0c2a11'; 'steps/000003/training/001-00000.5f0c2a11.json' ->
    'steps/000003/training/.5f0c2a11'.
    """
    if made := _MADE.fullmatch(key):
        found: str = next(filter(None, made.groups()))
        return found
    training = _TRAINING.fullmatch(key)
    return f"{training[1]}{training[2]}" if training else None
