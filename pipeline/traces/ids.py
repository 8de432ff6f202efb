"""Names of samples: the same in every retry and every run that replays a step."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.traces.records import TraceError

_NAMED = 5  # ids that an error names before it says how many more there are


def prompt_id(row: int, epoch: int) -> str:
    """A prompt's name: its row in the staged prompt table, and the epoch from epoch 1 on."""
    return str(row) if epoch == 0 else f"{row}.{epoch}"


def group_id(step: int, prompt_id: str) -> str:
    """The samples of one prompt in one step. Example: '000003/17'."""
    return f"{step:06d}/{prompt_id}"


def sample_id(step: int, prompt_id: str, k: int) -> str:
    """Sample k of a prompt. Example: '000003/17/2'."""
    return f"{group_id(step, prompt_id)}/{k}"


def validation_id(version: int, prompt_id: str, k: int) -> str:
    """Sample k of a prompt that validates a policy version. Example: 'val-000003/17/0'."""
    return f"val-{sample_id(version, prompt_id, k)}"


def expected_ids(plan: Mapping[str, Any]) -> list[str]:
    """The ids of all samples that a step's plan asks for, in the plan's order."""
    return [
        sample_id(plan["step"], prompt_id(prompt["row"], prompt["epoch"]), k)
        for prompt in plan["prompts"]
        for k in range(plan["n"])
    ]


def shard_ids(plan: Mapping[str, Any], shard: int) -> list[str]:
    """The ids of a shard's samples: prompt i of a plan is of shard i mod shards."""
    return expected_ids({**plan, "prompts": plan["prompts"][shard :: plan["shards"]]})


def sampling_seed(seed: int, sample_id: str) -> int:
    """The engine's seed of a sample: 31 bits of a hash of the run's seed and the sample's id."""
    digest = hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def check_ids(name: str, ids: Sequence[str], expected_ids: Sequence[str]) -> None:
    """Raise TraceError, naming samples that are missing, not expected, or there twice."""
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


def doubles(ids: Sequence[str]) -> str:
    """The ids that are there more than once, for an error."""
    return named("there twice", sorted(id for id, n in Counter(ids).items() if n > 1))


def named(problem: str, ids: Sequence[str]) -> str:
    """A problem with the first few of its samples, for an error."""
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return f"{problem}: {', '.join(ids[:_NAMED])}{more}"
