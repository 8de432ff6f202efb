"""The staged prompts of a run, and which samples of them a shard consists of."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from operators.rollout.records import Request, RolloutError
from pipeline.store import Store
from pipeline.store.commit import DataFile, read_data
from pipeline.traces import prompt_id, sample_id, sampling_seed, validation_id


@dataclass(frozen=True)
class Prompt:
    """One staged prompt: what the engine reads, and what the reward function is told."""

    tokens: tuple[int, ...]
    """Chat template and generation prompt applied."""
    data_source: str
    ground_truth: Any
    extra_info: Any
    """None: the prompt file has none."""


@dataclass(frozen=True)
class Wanted:
    """One sample to make. Example: Wanted('000003/17/2', '000003/17', '17', ...)."""

    id: str
    group: str
    prompt_id: str
    prompt: Prompt
    seed: int

    @property
    def request(self) -> Request:
        """What the engine is asked for."""
        return Request(self.id, self.prompt.tokens, self.seed)


class Prompts:
    """The staged prompt table: columns token_ids, data_source, ground_truth, extra_info."""

    def __init__(self, table: pa.Table, name: str) -> None:
        self._table = table
        self._name = name

    @classmethod
    def read(cls, store: Store, file: Mapping[str, Any]) -> "Prompts":
        """The table that run.json names. Raises ObjectMissingError, CorruptObjectError."""
        data = read_data(store, DataFile(**file))
        return cls(pq.read_table(pa.BufferReader(data)), file["key"])

    def prompt(self, row: int) -> Prompt:
        """A row of the table. Raises RolloutError when a plan names a row that is not there."""
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


def wanted_of(
    plan: Mapping[str, Any], shard: int, prompts: Prompts, validation: bool
) -> list[Wanted]:
    """A shard's samples in the plan's order: prompt i is in shard i mod shards, whole."""
    id_of = validation_id if validation else sample_id
    step = plan["policy_version"] if validation else plan["step"]
    found = []
    for named in plan["prompts"][shard :: plan["shards"]]:
        of_prompt = prompt_id(named["row"], named["epoch"])
        prompt = prompts.prompt(named["row"])
        for k in range(plan["n"]):
            id = id_of(step, of_prompt, k)
            seed = sampling_seed(plan["seed"], id)
            found.append(Wanted(id, id.rpartition("/")[0], of_prompt, prompt, seed))
    return found
