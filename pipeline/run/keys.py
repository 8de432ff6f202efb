"""The names of all objects of a run. No other module spells out a key.

Each docstring describes the objects under the returned key or prefix. Keys are relative to the
run's own root: a run is opened as the store `<store>/<run>`. A run or a recorded set therefore
remains readable after it is copied elsewhere as a folder.
"""

import re


def run_json() -> str:
    """The run description: resolved settings, inputs, geometry, versions."""
    return "run.json"


def removal() -> str:
    """The marker of a run that is being removed. While it exists, no flow attaches to the run."""
    return "removal.json"


def inputs() -> str:
    """Prefix of all staged inputs."""
    return "inputs/"


def input_file(sha256: str, name: str) -> str:
    """A staged input file."""
    return f"inputs/{sha256}/{name}"


def attempt(number: int) -> str:
    """An attempt: the operational settings of one start of the run."""
    return f"attempts/{number:03d}.json"


def stop(number: int) -> str:
    """The object that ends an attempt. Once it exists, the attempt's workers exit with 0."""
    return f"attempts/{number:03d}.stop.json"


def attempts() -> str:
    """Prefix of all attempts."""
    return "attempts/"


def sign(number: int, count: int) -> str:
    """A sign of life of an attempt's owner. Only the newest one matters.

    Args:
        number: The attempt's number.
        count: The number of signs that the attempt's owners gave before.
    """
    return f"{signs(number)}{count:08d}"


def signs(number: int) -> str:
    """Prefix of the signs of life of an attempt's owner."""
    return f"signs/{number:03d}."


def policies() -> str:
    """Prefix of all policies."""
    return "policies/"


def policy(version: int) -> str:
    """The commit of a policy version."""
    return f"policies/{version:06d}/policy.json"


def policy_file(version: int, write_id: str, name: str) -> str:
    """A file of a policy version.

    Args:
        version: The policy version.
        write_id: The write id of the version's files.
        name: The file's name.
    """
    return f"policies/{version:06d}/{write_id}/{name}"


def policy_share(version: int, write_id: str, rank: int) -> str:
    """The share of one training rank in a policy version.

    Args:
        version: The policy version.
        write_id: The write id of the version's files.
        rank: The training rank.
    """
    return policy_file(version, write_id, f"share-{rank:05d}.json")


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
    """A sub-plan of a step. Sub-plan 0 is the step's plan."""
    return step_prefix(step) + f"plan.{number:05d}.json" if number else plan(step)


_SUB_PLAN = re.compile(r"steps/(\d{6})/plan(?:\.(\d{5}))?\.json")


def sub_plan_number(key: str) -> int | None:
    """Return the number in a sub-plan's key; None for other keys.

    Example: 'steps/000003/plan.00002.json' -> 2.
    """
    match = _SUB_PLAN.fullmatch(key)
    if match is None or sub_plan(int(match[1]), int(match[2] or 0)) != key:
        return None
    return int(match[2] or 0)


def rollout(step: int, shard: int) -> str:
    """The commit of one rollout shard."""
    return step_prefix(step) + f"rollout/{shard:05d}.json"


def rollout_file(step: int, shard: int, write_id: str, kind: str) -> str:
    """A data file of a rollout shard.

    Args:
        step: The step.
        shard: The shard's number in its step.
        write_id: The write id of the shard's files.
        kind: 'samples' or 'routes'.
    """
    return step_prefix(step) + f"rollout/{shard:05d}.{write_id}.{kind}.parquet"


def manifest(step: int) -> str:
    """The manifest of a step, which seals its samples and routes."""
    return step_prefix(step) + "manifest.json"


def manifest_rows(step: int, write_id: str) -> str:
    """The manifest's rows, one per sample."""
    return step_prefix(step) + f"manifest.{write_id}.parquet"


def replays(step: int) -> str:
    """Prefix of all objects that a step took from a recorded set."""
    return step_prefix(step) + "replay/"


def replayed(step: int, key: str) -> str:
    """The copy of a recorded set's object in a step that was sealed from the set."""
    return replays(step) + key.removeprefix(step_prefix(step))


def trainings(step: int) -> str:
    """Prefix of all routes that the trainer recorded in a step."""
    return step_prefix(step) + "training/"


def trainer_routes(step: int) -> str:
    """The commit that lists the routes that the trainer recorded in a step (R2)."""
    return step_prefix(step) + "training.json"


def trainer_file(step: int, stage: int, dp_rank: int, set: str, cp_rank: int = 0) -> str:
    """A routes file that one rank of the trainer recorded.

    Args:
        step: The step.
        stage: The pipeline stage.
        dp_rank: The data-parallel rank.
        set: The write id that all ranks share.
        cp_rank: The context-parallel rank. The key contains this rank unless the rank is 0.
    """
    cut = f"-{cp_rank:05d}" if cp_rank else ""
    return f"{trainings(step)}{stage:03d}-{dp_rank:05d}{cut}.{set}.routes.parquet"


def metrics(step: int) -> str:
    """The step's metrics, which the trainer writes at the end of the step."""
    return step_prefix(step) + "metrics.json"


def pruned(step: int) -> str:
    """The marker of a sealed step whose samples and routes were removed to free space."""
    return step_prefix(step) + "pruned.json"


def checkpoints() -> str:
    """Prefix of all checkpoints."""
    return "checkpoints/"


def checkpoint(version: int) -> str:
    """The commit of a checkpoint: the training state of a policy version."""
    return f"checkpoints/{version:06d}/checkpoint.json"


def checkpoint_file(version: int, write_id: str, name: str) -> str:
    """A file of a checkpoint.

    Args:
        version: The policy version.
        write_id: The write id of the checkpoint's files.
        name: The file's name.
    """
    return f"checkpoints/{version:06d}/{write_id}/{name}"


def checkpoint_share(version: int, write_id: str, rank: int) -> str:
    """The share of one training rank in a checkpoint.

    Args:
        version: The policy version.
        write_id: The write id of the checkpoint's files.
        rank: The training rank.
    """
    return checkpoint_file(version, write_id, f"share-{rank:05d}.json")


def validations() -> str:
    """Prefix of all validations."""
    return "validations/"


def validation_plan(version: int) -> str:
    """The plan of a policy version's validation."""
    return f"validations/{version:06d}/plan.json"


def validation(version: int, shard: int) -> str:
    """The commit of one shard of a validation."""
    return f"validations/{version:06d}/{shard:05d}.json"


def validation_file(version: int, shard: int, write_id: str) -> str:
    """The samples of one shard of a validation.

    Args:
        version: The policy version.
        shard: The shard's number in the validation.
        write_id: The write id of the shard's files.
    """
    return f"validations/{version:06d}/{shard:05d}.{write_id}.samples.parquet"


def clocks() -> str:
    """Prefix of the objects that show the store's time."""
    return "clock/"


def clock(write_id: str) -> str:
    """An empty object that is removed immediately. Its modification time is the store's time."""
    return clocks() + write_id


_SHARE = re.compile(r"(?:policies|checkpoints)/\d{6}/[0-9a-f]{8}/share-\d{5}\.json")


def is_share(key: str) -> bool:
    """Return whether a key names a training rank's share of a policy version or checkpoint."""
    return _SHARE.fullmatch(key) is not None


_NUMBERED = re.compile(r"/(\d{6})/[^/]+\.json$")


def number_of(key: str) -> int | None:
    """Return the step or version in a commit's key: 'steps/000003/plan.json' -> 3.

    Returns None for other keys.
    """
    match = _NUMBERED.search("/" + key)
    return int(match.group(1)) if match else None


_ATTEMPT = re.compile(r"attempts/(\d{3,})\.json")


def attempt_number(key: str) -> int | None:
    """Return the number in an attempt's key; None for other keys.

    Example: 'attempts/002.json' -> 2.
    """
    match = _ATTEMPT.fullmatch(key)
    return int(match.group(1)) if match else None


_SHARD = re.compile(r"(?:steps/\d{6}/rollout|validations/\d{6})/\d{5}\.json")


def commits_shard(key: str) -> bool:
    """Return whether a key names the commit of a shard of a step or validation."""
    return _SHARD.fullmatch(key) is not None


_FOLDER = re.compile(r"^[a-z]+/(\d{6})/")


def folder_number(key: str) -> int | None:
    """Return the step or version of an object's folder: 'policies/000003/aa/x' -> 3.

    Returns None for other keys.
    """
    match = _FOLDER.match(key)
    return int(match.group(1)) if match else None


_MADE = re.compile(
    r"(steps/\d{6}/(?:rollout/)?[a-z\d-]+\.[0-9a-f]{8})\.(?:[a-z]+\.)?parquet"
    r"|(validations/\d{6}/\d{5}\.[0-9a-f]{8})\.samples\.parquet"
    r"|((?:policies|checkpoints)/\d{6}/[0-9a-f]{8})/[^/]+"
)
_TRAINING = re.compile(
    r"(steps/\d{6}/training/)\d{3}-\d{5}(?:-\d{5})?(\.[0-9a-f]{8})\.routes\.parquet"
)


def maker_of(key: str) -> str | None:
    """Return the part that a key shares with all other keys that contain the same write id.

    Returns None if the key does not contain a write id. All ranks of a trainer share one. Examples:
    'steps/000003/rollout/00001.5f0c2a11.routes.parquet' -> 'steps/000003/rollout/00001.5f0c2a11';
    'steps/000003/training/001-00000.5f0c2a11.routes.parquet' -> 'steps/000003/training/.5f0c2a11'.
    """
    if made := _MADE.fullmatch(key):
        found: str = next(filter(None, made.groups()))
        return found
    training = _TRAINING.fullmatch(key)
    return f"{training[1]}{training[2]}" if training else None
