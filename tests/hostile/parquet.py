"""Parquet files taken apart, changed and put together again, with their row groups."""

import io
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Change = Callable[[pa.Table], pa.Table | None]


def table_of(data: bytes) -> pa.Table:
    """All columns and rows of a file."""
    return pq.read_table(io.BytesIO(data), use_threads=False)


def rewritten(data: bytes, change: Change) -> bytes | None:
    """A file with its rows changed; None: the change is not possible, or changes nothing.

    Row groups hold as many rows as they held, as long as there are rows.
    """
    try:
        before = table_of(data)
        after = change(before)
        if after is None or _same(after, before):
            return None
        metadata = pq.read_metadata(io.BytesIO(data))
        sizes = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        return written(after, sizes)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, UnicodeError):
        return None  # no Parquet file can hold it


def _same(one: pa.Table, other: pa.Table) -> bool:
    """Equal names, types, values and metadata, whether columns may hold nulls or not."""
    return (
        one.column_names == other.column_names
        and (one.schema.metadata or {}) == (other.schema.metadata or {})
        and all(
            a.type == b.type and a.equals(b)
            for a, b in zip(one.columns, other.columns, strict=True)
        )
    )


def written(table: pa.Table, sizes: list[int]) -> bytes:
    """A file of a table in row groups of these sizes; what is left goes to one more."""
    out, at = io.BytesIO(), 0
    plain = table.schema.remove_metadata()
    with pq.ParquetWriter(out, plain, compression="zstd", store_schema=False) as writer:
        writer.add_key_value_metadata(table.schema.metadata or {})
        for size in [*sizes, len(table)]:
            if at < len(table):
                writer.write_table(table.replace_schema_metadata(None).slice(at, size))
                at += size
    return out.getvalue()


def with_values(table: pa.Table, name: str, values: list[Any], kind: pa.DataType) -> pa.Table:
    """Another column in the place of one."""
    field = table.schema.field(name).with_nullable(True).with_type(kind)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values, kind))


def with_metadata(table: pa.Table, changes: dict[bytes, bytes | None]) -> pa.Table:
    """Other key-value metadata; None: without that key."""
    found = {**(table.schema.metadata or {}), **changes}
    return table.replace_schema_metadata({k: v for k, v in found.items() if v is not None})
