"""Functions that read a Parquet file, change it, and write it with the same row groups."""

import io
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Change = Callable[[pa.Table], pa.Table | None]


def table_of(data: bytes) -> pa.Table:
    """Return all columns and rows of a file."""
    return pq.read_table(io.BytesIO(data), use_threads=False)


def rewritten(data: bytes, change: Change) -> bytes | None:
    """Return a file with changed rows; None if the change is impossible or changes nothing.

    Row groups keep their sizes as long as enough rows remain.
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
        return None  # a Parquet file cannot hold the changed values


def _same(one: pa.Table, other: pa.Table) -> bool:
    """Compare names, types, values and metadata, but not whether columns may contain nulls."""
    return (
        one.column_names == other.column_names
        and (one.schema.metadata or {}) == (other.schema.metadata or {})
        and all(
            a.type == b.type and a.equals(b)
            for a, b in zip(one.columns, other.columns, strict=True)
        )
    )


def written(table: pa.Table, sizes: list[int]) -> bytes:
    """Return a table as a file with row groups of these sizes, and one for the remaining rows."""
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
    """Return the table with new values of type `kind` in the column `name`."""
    field = table.schema.field(name).with_nullable(True).with_type(kind)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values, kind))


def with_metadata(table: pa.Table, changes: dict[bytes, bytes | None]) -> pa.Table:
    """Return the table with changed key-value metadata; None removes a key."""
    found = {**(table.schema.metadata or {}), **changes}
    return table.replace_schema_metadata({k: v for k, v in found.items() if v is not None})
