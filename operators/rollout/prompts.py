"""The staged prompts of a run, and the planned samples of a shard."""

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from operators.rollout.types import Request, RolloutError
from pipeline.run.commit import DataFile, read_data
from pipeline.run.plan import Plan
from pipeline.store import Store
from pipeline.traces import planned_id, prompt_id, sampling_seed


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


class Prompts:
    """The staged prompt table. Columns: token_ids, data_source, ground_truth, extra_info."""

    def __init__(self, table: pa.Table, name: str) -> None:
        self._table = table
        self._name = name

    @classmethod
    def read(cls, store: Store, file: DataFile) -> "Prompts":
        """Read the table from its staged file. Raises ObjectMissingError, CorruptObjectError."""
        return cls(pq.read_table(pa.BufferReader(read_data(store, file))), file.key)

    @property
    def count(self) -> int:
        """The number of prompts."""
        return int(self._table.num_rows)

    def prompt(self, row: int) -> Prompt:
        """Return the prompt in a row of the table. Raises RolloutError if there is no such row."""
        if not 0 <= row < self._table.num_rows:
            raise RolloutError(
                f"{self._name}: the plan names row {row}, expected 0..{self._table.num_rows - 1}: "
                "the plan was built from different prompts"
            )

        def value(column: str) -> Any:
            return self._table[column][row].as_py()

        extra_info = value("extra_info")
        return Prompt(
            tokens=tuple(value("token_ids")),
            data_source=value("data_source"),
            ground_truth=json.loads(value("ground_truth")),
            extra_info={} if extra_info is None else json.loads(extra_info),
        )


def shards_of(worker: int, workers: int, shards: int) -> list[int]:
    """Return the shards that a worker generates: shard s belongs to worker s mod `workers`.

    Args:
        worker: The worker's index, counted from 0.
        workers: The number of rollout workers.
        shards: The number of shards in the plan.
    """
    return [shard for shard in range(shards) if shard % workers == worker]


def wanted_of(plan: Plan, shard: int, prompts: Prompts) -> list[Wanted]:
    """Return the planned samples of a shard, in the plan's order.

    Args:
        plan: The plan of a step or of a validation.
        shard: The index of the shard in the plan.
        prompts: The staged prompts that the plan refers to.

    Raises:
        RolloutError: The plan names a row that the prompt table lacks.
    """
    found = []
    for planned in plan.prompts_of(shard):
        prompt = prompts.prompt(planned.row)
        name = prompt_id(planned.row, planned.epoch)
        for k in range(plan.group_samples):
            id = planned_id(plan, planned, k)
            group = id.rpartition("/")[0]
            seed = sampling_seed(plan.seed, id)
            found.append(Wanted(id, group, name, prompt, seed, baseline=k >= plan.n))
    return found
