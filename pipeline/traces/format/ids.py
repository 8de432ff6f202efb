"""Names of samples.

A sample has the same name in every retry of its step, and in every run that replays this step.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from string import ascii_letters, digits

from pipeline.run.plan import Plan, PlannedPrompt, StepPlan
from pipeline.traces.format.types import TraceError

VALIDATION = "val-"
"""Prefix of the ids of a validation's samples."""
_FILE_CHARACTERS = {ord(c): c for c in f"{ascii_letters}{digits}.-"} | {ord("/"): "_"}
_FILE_NAME_BYTES = 200
_NAMED = 5  # the number of ids that an error message lists; others are just counted


def prompt_id(row: int, epoch: int) -> str:
    """Return a prompt's name: its row in the prompt table and, from epoch 1 on, the epoch."""
    return str(row) if epoch == 0 else f"{row}.{epoch}"


def group_id(step: int, prompt_id: str) -> str:
    """Return the name of a group: the samples of one prompt in one step. Example: '000003/17'."""
    return f"{step:06d}/{prompt_id}"


def sample_id(step: int, prompt_id: str, k: int) -> str:
    """Return the name of sample k of a prompt.

    Args:
        step: The step.
        prompt_id: The prompt's name from `prompt_id`.
        k: The number of the sample within the group.

    Returns:
        The sample id. Example: '000003/17/2'.
    """
    return f"{group_id(step, prompt_id)}/{k}"


def validation_id(version: int, prompt_id: str, k: int) -> str:
    """Return the name of sample k of a prompt in a validation.

    Args:
        version: The policy version that is validated.
        prompt_id: The prompt's name from `prompt_id`.
        k: The number of the sample within the group.

    Returns:
        The sample id. Example: 'val-000003/17/0'.
    """
    return VALIDATION + sample_id(version, prompt_id, k)


def planned_id(plan: Plan, prompt: PlannedPrompt, k: int) -> str:
    """Return the name of sample k of a prompt in a plan.

    Args:
        plan: The plan of a step or a validation.
        prompt: A prompt of the plan.
        k: The number of the sample within the group.
    """
    named = prompt_id(prompt.row, prompt.epoch)
    if isinstance(plan, StepPlan):
        return sample_id(plan.step, named, k)
    return validation_id(plan.policy_version, named, k)


def expected_ids(plan: Plan) -> list[str]:
    """Return the ids of all samples of a plan, in the plan's order."""
    return _ids(plan, plan.prompts)


def shard_ids(plan: Plan, shard: int) -> list[str]:
    """Return the ids of a shard's samples, in the plan's order."""
    return _ids(plan, plan.prompts_of(shard))


def baseline_ids(plan: StepPlan) -> list[str]:
    """Return the ids of a plan's greedy samples; an empty list if the plan has no baselines."""
    prompts = plan.prompts if plan.baseline else ()
    return [planned_id(plan, prompt, plan.n) for prompt in prompts]


def _ids(plan: Plan, prompts: Sequence[PlannedPrompt]) -> list[str]:
    return [planned_id(plan, prompt, k) for prompt in prompts for k in range(plan.group_samples)]


def sampling_seed(seed: int, sample_id: str) -> int:
    """Return the engine's seed for a sample: 31 bits of a hash of the run's seed and the id."""
    digest = hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def file_name(id: str) -> str:
    """Return the base name of a sample's exported files: '000003/17/2' -> '000003_17_2'.

    Different ids have different names. However, two names may differ only in capitalization, which
    some file systems ignore.
    """
    name = "".join(_FILE_CHARACTERS.get(byte, f"%{byte:02X}") for byte in id.encode())
    if len(name) <= _FILE_NAME_BYTES:
        return name
    return f"{name[:150]}~{hashlib.sha256(id.encode()).hexdigest()[:16]}"


def check_ids(name: str, ids: Sequence[str], expected_ids: Sequence[str]) -> None:
    """Raise TraceError if ids are missing, unexpected or duplicated.

    Args:
        name: The object, for the error message.
        ids: The ids found, in any order.
        expected_ids: The ids that must be found exactly once.
    """
    found, expected = set(ids), set(expected_ids)
    problems = [
        named(problem, which)
        for problem, which in (
            ("missing", sorted(expected - found)),
            ("not expected", sorted(found - expected)),
        )
        if which
    ]
    if len(found) != len(ids):
        problems.append(doubles(ids))
    if problems:
        raise TraceError(
            f"{name}: {len(ids)} samples, expected {len(expected)}; {'; '.join(problems)}"
        )


def check_once(name: str, ids: Sequence[str]) -> None:
    """Raise TraceError if any id occurs more than once; the message names these ids."""
    if len(set(ids)) != len(ids):
        raise TraceError(f"{name}: {doubles(ids)}")


def doubles(ids: Sequence[str]) -> str:
    """Return the ids that occur more than once, for an error message."""
    return named("duplicated", sorted(id for id, n in Counter(ids).items() if n > 1))


def named(problem: str, ids: Sequence[str]) -> str:
    """Return a problem and the first few samples that it affects, for an error message."""
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return f"{problem}: {', '.join(ids[:_NAMED])}{more}"
