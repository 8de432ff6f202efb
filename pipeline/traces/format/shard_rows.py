"""The manifest rows of a committed rollout shard, before and after its step is sealed."""

from collections.abc import Set
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store import Store
from pipeline.traces.format.chunks import read_table
from pipeline.traces.format.header import Header
from pipeline.traces.format.manifest import file_of
from pipeline.traces.format.schema import MANIFEST, SAMPLES, SUMMARY
from pipeline.traces.format.types import TraceError

NO_REWARD = "no reward"
"""The recorded reason for not training on a sample whose reward function failed."""
BASELINE = "greedy baseline"
"""The recorded reason for not training on a sample whose reward is its group's baseline."""
OF_ROUTES = ("routes_digest", "rows_valid", "segments")
"""Columns of a sample that are null if, and only if, its shard has no routes."""
_SHARD = pa.schema([*SUMMARY, SAMPLES.field("segments"), SAMPLES.field("version_spans")])


def shard_rows(
    store: Store, header: Header, first: int, baselines: Set[str] = frozenset()
) -> pa.Table:
    """Read the manifest rows of a rollout shard, with their version spans.

    Args:
        store: The store that contains the shard.
        header: The shard's commit.
        first: The index of the shard's first file in the manifest's list.
        baselines: Ids of greedy samples.

    Returns:
        One row per sample: the columns of schema.MANIFEST, then segments and version spans.

    Raises:
        TraceError: The commit does not list a required file, or a sample lacks the columns that
            describe its routes although the shard has routes, or the reverse.
    """
    numbers = {file.role: first + i for i, file in enumerate(header.files)}
    file = file_of(header, "samples")
    if file is None or (header.geometry is not None and "routes" not in numbers):
        raise TraceError(
            f"{header.key} in {store.uri}: files {sorted(numbers)}, expected 'samples' and, with "
            "a geometry, 'routes'"
        )
    table = read_table(store, file, _SHARD)
    rows = len(table)
    for name in OF_ROUTES:
        if table[name].null_count != (rows if header.geometry is None else 0):
            has = "no" if header.geometry is None else "a"
            raise TraceError(
                f"{file.data.key}: {name} is null in {table[name].null_count} of {rows} samples, "
                f"but {header.key} has {has} geometry of routes; remake the step"
            )
    for name in ("token_digest", "routes_digest"):
        matches = pc.fill_null(is_sha256(table[name]), True)
        for id in table["id"].filter(pc.invert(matches)).slice(0, 1).to_pylist():
            raise TraceError(
                f"{file.data.key}: sample {id}: {name} is not a SHA-256 digest of 64 lower-case "
                "hexadecimal digits; remake the step"
            )
    samples = _structs(
        file=np.full(rows, numbers["samples"], np.int32), row=np.arange(rows, dtype=np.int32)
    )
    if header.geometry is None:
        routes = pa.nulls(rows, MANIFEST.field("routes").type)
    else:
        segments = table["segments"].combine_chunks()
        part = _structs(file=np.full(rows, numbers["routes"], np.int32), segments=segments)
        routes = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32), part)
    not_trained = pc.if_else(pc.is_null(table["reward"]), NO_REWARD, pa.scalar(None, pa.string()))
    not_trained = pc.if_else(is_one_of(table["id"], baselines), BASELINE, not_trained)
    columns = {"samples": samples, "routes": routes, "not_trained": not_trained}
    columns["part_digests"] = pa.nulls(rows, MANIFEST.field("part_digests").type)  # only one part
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def is_one_of(column: pa.ChunkedArray, names: Set[str]) -> pa.ChunkedArray:
    """Return whether each text is one of `names`.

    Arrow hashes all names that it is given. It is given only those in the column, because a step
    may have thousands of names, and each of its thousands of shards a few of them.
    """
    present = [text for text in pc.unique(column).to_pylist() if text in names] if names else []
    return pc.is_in(column, pa.array(present, pa.string()))


def is_sha256(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return whether each text is a SHA-256 digest of 64 lower-case hexadecimal digits."""
    return pc.match_substring_regex(column, "^[0-9a-f]{64}$")


def _structs(**fields: Any) -> pa.StructArray:
    return pa.StructArray.from_arrays([pa.array(f) for f in fields.values()], names=list(fields))


def versions_of(rows: pa.Table) -> tuple[int, ...]:
    """Return the policy versions in the `version_spans` of samples, ascending."""
    spans = pc.list_flatten(rows["version_spans"])
    return tuple(sorted(pc.unique(pc.struct_field(spans, "version")).to_pylist()))
