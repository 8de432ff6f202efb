"""The part of `verify` that compares samples with the prompts that their run staged."""

import io
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.run.commit import CorruptObjectError, DataFile, read_data
from pipeline.store import Store
from pipeline.traces.format.digests import token_digest
from pipeline.traces.format.types import Sample, TraceError

_PROMPTS_AT_ONCE = 4_096


@dataclass(frozen=True)
class Prompts:
    """A run's table of staged prompts."""

    key: str
    """The key of the staged file."""
    digests: Mapping[str, str]
    """The token digest of each prompt, keyed by row of the table."""

    def check(self, sample: Sample) -> None:
        """Raise TraceError unless a sample begins with the staged prompt that its id names."""
        row = sample.prompt_id.partition(".")[0]
        if row not in self.digests:
            raise TraceError(f"prompt {row} is not in {self.key}; restore the run's own objects")
        found = token_digest(sample.prompt_tokens_P)
        if found != self.digests[row]:
            raise TraceError(
                f"its prompt has token digest {found[:16]}..., but prompt {row} in {self.key} has "
                f"{self.digests[row][:16]}...; restore the run's own objects"
            )


def read_prompts(store: Store, file: DataFile) -> Prompts:
    """Read a table of staged prompts. Raises StoreError if it is damaged."""
    digests: dict[str, str] = {}
    try:
        with pq.ParquetFile(io.BytesIO(read_data(store, file))) as table:
            for batch in table.iter_batches(_PROMPTS_AT_ONCE, columns=["prompt_id", "token_ids"]):
                rows, tokens = batch["prompt_id"].to_pylist(), batch["token_ids"]
                for row, of_prompt in zip(rows, tokens, strict=True):
                    digests[str(row)] = token_digest(of_prompt.values.to_numpy())
    except (pa.ArrowException, KeyError, OSError, ValueError) as error:
        raise CorruptObjectError(f"{file.key}: not a table of prompts: {error}") from error
    return Prompts(file.key, digests)
