"""Names of samples: the same in every retry and every run that replays a step."""

import hashlib
from collections.abc import Mapping
from typing import Any


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


def sampling_seed(seed: int, sample_id: str) -> int:
    """The engine's seed of a sample: 31 bits of a hash of the run's seed and the sample's id."""
    digest = hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
