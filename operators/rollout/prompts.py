"""The staged prompts of a run, and the planned samples of a shard."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from operators.rollout.types import Request, RolloutError
from pipeline.run.plan import Plan
from pipeline.run.prompt_table import StoredPrompts
from pipeline.traces import planned_id, prompt_id, sampling_seed

_COLUMNS = ("token_ids", "data_source", "ground_truth", "extra_info")


@dataclass(frozen=True)
class Prompt:
    """One staged prompt: the engine's input, and further arguments for the reward function."""

    tokens: tuple[int, ...]
    """Token ids, with chat template and generation prompt applied."""
    data_source: str
    ground_truth: Any
    extra_info: Any
    """Empty, as in verl, if the prompt file lacks this column or the row has no value in it."""


@dataclass(frozen=True)
class Wanted:
    """One sample to generate, such as '000003/17/2' of the group '000003/17'."""

    id: str
    group: str
    prompt_id: str
    prompt: Prompt
    seed: int
    baseline: bool = False
    """Whether this is the greedy sample of its group. It is not trained on, and its reward is the
    group's baseline."""

    @property
    def request(self) -> Request:
        """The request for the engine."""
        return Request(self.id, self.prompt.tokens, self.seed, self.baseline)


def read_prompts(table: StoredPrompts, rows: Collection[int]) -> dict[int, Prompt]:
    """Read the prompts in some rows of a table, keyed by row.

    Raises RolloutError if there is no such row. Raises CorruptObjectError and StoreError.
    """
    if wrong := [row for row in rows if not 0 <= row < table.rows]:
        raise RolloutError(
            f"{table.name}: the plan names row {wrong[0]}, expected 0..{table.rows - 1}: the plan "
            "was built from different prompts"
        )
    found = {}
    for row in table.read(rows, _COLUMNS).to_pylist():
        extra_info = row["extra_info"]
        found[row["prompt_id"]] = Prompt(
            tokens=tuple(row["token_ids"]),
            data_source=row["data_source"],
            ground_truth=json.loads(row["ground_truth"]),
            extra_info={} if extra_info is None else json.loads(extra_info),
        )
    return found


def shards_of(worker: int, workers: int, shards: int) -> list[int]:
    """Return the shards that a worker generates: shard s belongs to worker s mod `workers`.

    Args:
        worker: The worker's index, counted from 0.
        workers: The number of rollout workers.
        shards: The number of shards in the plan.
    """
    return [shard for shard in range(shards) if shard % workers == worker]


def wanted_of(plan: Plan, shard: int, prompts: StoredPrompts) -> list[Wanted]:
    """Return the planned samples of a shard, in the plan's order.

    Args:
        plan: The plan of a step or of a validation.
        shard: The index of the shard in the plan.
        prompts: The staged prompts that the plan refers to.

    Raises:
        RolloutError: The plan names a row that the prompt table lacks.
        CorruptObjectError: The table is damaged.
        StoreError: The table cannot be read.
    """
    found = []
    of_shard = plan.prompts_of(shard)
    read = read_prompts(prompts, [planned.row for planned in of_shard])
    for planned in of_shard:
        prompt = read[planned.row]
        name = prompt_id(planned.row, planned.epoch)
        for k in range(plan.group_samples):
            id = planned_id(plan, planned, k)
            group = id.rpartition("/")[0]
            seed = sampling_seed(plan.seed, id)
            found.append(Wanted(id, group, name, prompt, seed, baseline=k >= plan.n))
    return found
