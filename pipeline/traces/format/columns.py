"""The Parquet types of columns, as listed in docs/trace-format.md.

A Parquet library silently casts values if it can, for example 64-bit integers to 32 bits, or dates
to numbers. Because a column's type determines its meaning, a reader first checks the types in the
file's footer. Arrow types that a file suggests (`ARROW:schema`, dictionaries, large lists) are
ignored.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.traces.format.types import TraceError


class _Type(NamedTuple):
    physical: str
    logical: str
    """Parquet's annotation of the physical type, such as STRING or UINT_32. NONE if there is no
    annotation, or if the annotation has no effect (`_SAME`)."""
    repeated: int
    """The number of lists around the value."""


_PLAIN = {
    pa.string(): ("BYTE_ARRAY", "STRING"),
    pa.binary(): ("BYTE_ARRAY", "NONE"),
    pa.int32(): ("INT32", "NONE"),
    pa.int64(): ("INT64", "NONE"),
    pa.uint32(): ("INT32", "UINT_32"),
    pa.float64(): ("DOUBLE", "NONE"),
    pa.float32(): ("FLOAT", "NONE"),
    pa.bool_(): ("BOOLEAN", "NONE"),
}
_SAME = {"INT_32": "NONE", "INT_64": "NONE"}
"""Annotations without effect: signed integers as wide as their physical type."""


def check_columns(metadata: pq.FileMetaData, schema: pa.Schema, name: str) -> None:
    """Raise TraceError unless a file's columns have the schema's types.

    The caller must handle columns that are only in the schema or only in the file.

    Args:
        metadata: The parsed footer of the file.
        schema: The expected columns.
        name: The file, for error messages.

    Raises:
        TraceError: A column has a different type; the message names the column and both types.
    """
    expected = {path: kind for field in schema for path, kind in _leaves(field.name, field.type, 0)}
    tops = set(schema.names)
    found = {}
    for i in range(metadata.num_columns):
        column = metadata.schema.column(i)
        if column.path.partition(".")[0] in tops:
            found[column.path] = _type_of(column)
    there = {path.partition(".")[0] for path in found}
    for path, kind in expected.items():
        if path.partition(".")[0] in there and found.get(path) != kind:
            is_ = (
                _shown(found[path])
                if path in found
                else f"missing; its column has {_of(found, path)}"
            )
            raise TraceError(f"{name}: its column {path} is {is_}, expected {_shown(kind)}")
    if unknown := sorted(found.keys() - expected.keys()):
        raise TraceError(
            f"{name}: its column {unknown[0]} has a part that the format does not define"
        )


def has_null(array: pa.Array) -> bool:
    """Return whether a value inside a list or struct is null.

    Our writers do not write such values.
    """
    if pa.types.is_list(array.type):
        parts = [array.flatten()]
    elif pa.types.is_struct(array.type):
        parts = array.flatten()
    else:
        return False
    return any(part.null_count or has_null(part) for part in parts)


def _leaves(path: str, type_: pa.DataType, repeated: int) -> Iterator[tuple[str, _Type]]:
    """Yield the paths and types of a column's leaves."""
    if pa.types.is_list(type_):
        yield from _leaves(f"{path}.list.element", type_.value_type, repeated + 1)
    elif pa.types.is_struct(type_):
        for field in type_:
            yield from _leaves(f"{path}.{field.name}", field.type, repeated)
    else:
        plain = type_.value_type if pa.types.is_dictionary(type_) else type_
        yield path, _Type(*_PLAIN[plain], repeated)


def _type_of(column: pq.ColumnSchema) -> _Type:
    logical = column.logical_type.type
    if logical == "INT":
        logical = _SAME.get(column.converted_type, column.converted_type)
    return _Type(column.physical_type, logical, column.max_repetition_level)


def _shown(kind: _Type) -> str:
    """Return a type for an error message. Example: 'INT32 (UINT_32) in 1 list'."""
    logical = "" if kind.logical == "NONE" else f" ({kind.logical})"
    lists = f" in {kind.repeated} list{'s' * (kind.repeated > 1)}" if kind.repeated else ""
    return f"{kind.physical}{logical}{lists}"


def _of(found: dict[str, _Type], path: str) -> str:
    top = path.partition(".")[0]
    return ", ".join(sorted(other for other in found if other.partition(".")[0] == top))
