"""The staged prompts of a run, and the samples of a shard."""

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
    """One staged prompt: the engine's input, and the reward function's other arguments."""

    tokens: tuple[int, ...]
    """Token ids, with chat template and generation prompt applied."""
    data_source: str
    ground_truth: Any
    extra_info: Any
    """None: the prompt file has no such column."""


@dataclass(frozen=True)
class Wanted:
    """One sample to make. Example: Wanted('000003/17/2', '000003/17', '17', ...)."""

    id: str
    group: str
    prompt_id: str
    prompt: Prompt
    seed: int
    baseline: bool = False
    """Greedy, and not trained on: its reward is the baseline of its group."""

    @property
    def request(self) -> Request:
        """The request to the engine."""
        return Request(self.id, self.prompt.tokens, self.seed, self.baseline)


class Prompts:
    """The staged prompt table: columns token_ids, data_source, ground_truth, extra_info."""

    def __init__(self, table: pa.Table, name: str) -> None:
        self._table = table
        self._name = name

    @classmethod
    def read(cls, store: Store, file: DataFile) -> "Prompts":
        """Read the table from its staged file. Raises ObjectMissingError, CorruptObjectError."""
        return cls(pq.read_table(pa.BufferReader(read_data(store, file))), file.key)

    def prompt(self, row: int) -> Prompt:
        """A row of the table. Raises RolloutError when the table has no such row."""
        if not 0 <= row < self._table.num_rows:
            raise RolloutError(
                f"{self._name} has rows 0..{self._table.num_rows - 1}, a plan names row {row}: "
                "the plan was made from other prompts"
            )

        def value(column: str) -> Any:
            return self._table[column][row].as_py()

        extra_info = value("extra_info")
        return Prompt(
            tokens=tuple(value("token_ids")),
            data_source=value("data_source"),
            ground_truth=json.loads(value("ground_truth")),
            extra_info=None if extra_info is None else json.loads(extra_info),
        )


def shards_of(worker: int, workers: int, shards: int) -> list[int]:
    """The shards that a worker makes: shard s belongs to worker s mod workers."""
    return [shard for shard in range(shards) if shard % workers == worker]


def wanted_of(plan: Plan, shard: int, prompts: Prompts) -> list[Wanted]:
    """The samples of a shard, in the plan's order."""
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
