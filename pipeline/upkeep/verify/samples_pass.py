"""The part of `verify` that checks each sample of a shard, also against the run's prompts."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.run.commit import CorruptObjectError, DataFile, read_data
from pipeline.run.parse import same
from pipeline.store import Store
from pipeline.traces.format.chunks import TraceFile, read_footer, read_table
from pipeline.traces.format.digests import token_digest
from pipeline.traces.format.domain import check_written
from pipeline.traces.format.header import Header
from pipeline.traces.format.ids import doubles
from pipeline.traces.format.schema import SAMPLES, SUMMARY
from pipeline.traces.format.shard_rows import OF_ROUTES, is_sha256, versions_of
from pipeline.traces.format.types import Sample, TraceError
from pipeline.traces.read.rows import sample_at
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.footer import check_statistics

ROWS = [*SUMMARY.names, "segments", "version_spans"]
"""The columns that are compared with the manifest and the routes."""

_SPANS = "version_spans"
_PROMPTS_AT_ONCE = 4_096


@dataclass(frozen=True)
class StagedPrompts:
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


def read_prompts(store: Store, file: DataFile) -> StagedPrompts:
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
    return StagedPrompts(file.key, digests)


def read_shard_rows(
    store: Store, file: TraceFile, header: Header, prompts: StagedPrompts | None, report: Report
) -> pa.Table:
    """Read the samples file of a shard, and report the problems with individual samples.

    Args:
        store: The run or recorded set.
        file: The samples file as described in its commit.
        header: The shard's commit.
        prompts: The staged prompts of the samples' run; None if they are unknown.
        report: Receives the problems with samples.

    Returns:
        The columns ROWS of all samples.

    Raises:
        TraceError: A problem affects the whole file. Errors from `read_table` are raised
            unchanged.
    """
    key, step = file.data.key, int(header.body["step"])
    tables = [SAMPLES.empty_table().select(ROWS)]
    footer = read_footer(store, file)
    for group in range(len(file.row_groups)):
        table = read_table(store, file, SAMPLES, [group], footer=footer).combine_chunks()
        check_statistics(footer, file, group, table)
        ids = table["id"].to_pylist()
        wrong: dict[int, str] = {}
        for row, text in _wrong(table, routes=header.geometry is not None):
            wrong.setdefault(row, text)
        for row, id in enumerate(ids):
            with report.noting(key, id):
                sample = sample_at(table, row, key)
                check_written(sample, step)
                if prompts is not None:
                    prompts.check(sample)
            if row in wrong:
                report.add(key, wrong[row], id)
        tables.append(table.select(ROWS))
    rows = pa.concat_tables(tables)
    if len(ids := rows["id"].to_pylist()) != len(set(ids)):
        raise TraceError(f"{key}: {doubles(ids)}")
    _check_branches(key, rows)
    if not same(header.body.get("samples"), len(rows)):
        raise TraceError(
            f"{header.key}: {header.body.get('samples')} samples, but {key} has {len(rows)}"
        )
    _check_policies(header, rows)
    return rows


def _wrong(table: pa.Table, routes: bool) -> Iterator[tuple[int, str]]:
    """Yield the index and problem of each row whose columns contradict each other."""
    both = pc.and_(pc.is_valid(table["reward"]), pc.is_valid(table["reward_error"]))
    yield from _rows(_mask(both), "it has a reward and a reward_error")
    digests = is_sha256(table["token_digest"])
    yield from _rows(~_mask(digests), "its token_digest is not a SHA-256")
    for name in OF_ROUTES:
        text = "null, but its shard has routes" if routes else "set, but its shard has no routes"
        yield from _rows(_mask(pc.is_null(table[name])) == routes, f"{name} is {text}")
    if routes:
        digests = pc.fill_null(is_sha256(table["routes_digest"]), False)
        yield from _rows(~_mask(digests), "its routes_digest is not a SHA-256")


def _check_branches(key: str, rows: pa.Table) -> None:
    """Raise TraceError unless each branch belongs to a first sequence in its own group."""
    branches = rows.filter(pc.is_valid(rows["branch_of"])).select(["id", "group", "branch_of"])
    if not len(branches):
        return
    firsts = {row["id"]: row for row in rows.select(["id", "group", "branch_of"]).to_pylist()}
    for row in branches.to_pylist():
        name = f"{key}: sample {row['id']}: a branch of {row['branch_of']}"
        first = firsts.get(row["branch_of"])
        if first is None or first["branch_of"] is not None or first["group"] != row["group"]:
            raise TraceError(f"{name}, which is not a first sequence of its group")


def _check_policies(header: Header, rows: pa.Table) -> None:
    """Raise TraceError if the commit lists policy versions but omits one that sampled tokens."""
    if header.policies is None:
        return
    found = set(versions_of(rows))
    if unknown := found - header.policies.keys():
        raise TraceError(
            f"{header.key}: tokens from policy version {min(unknown)}, but its policies are "
            f"{sorted(header.policies)}"
        )


def _mask(values: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    return np.asarray(values.to_numpy(), np.bool_)


def _rows(wrong: npt.NDArray[np.bool_], text: str) -> Iterator[tuple[int, str]]:
    return ((row, text) for row in np.flatnonzero(wrong).tolist())
