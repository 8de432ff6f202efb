"""The Parquet types of columns, as docs/trace-format.md lists them.

A Parquet library casts in silence what it can: 64-bit integers to 32, dates to numbers. What a
column means follows from its type, so a reader compares the types in the file's footer first. How
Arrow would like to see a column (`ARROW:schema`, dictionaries, large lists) means nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.traces.format.types import TraceError


class _Type(NamedTuple):
    physical: str
    logical: str
    """NONE, STRING or INT; INT of another width or sign than expected has another name."""
    repeated: int
    """How many lists it is in."""


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
"""A signed integer as wide as its physical type may say so or not."""


def check_columns(metadata: pq.FileMetaData, schema: pa.Schema, name: str) -> None:
    """Refuse columns of other types than the schema's, by the footer of their file.

    Columns of the schema that the file lacks, and those of the file that the schema lacks, are the
    caller's. Raises TraceError, naming the column, its type and the type expected.
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
                else f"not there; its column has {_of(found, path)}"
            )
            raise TraceError(f"{name}: its column {path} is {is_}, expected {_shown(kind)}")
    if unknown := sorted(found.keys() - expected.keys()):
        raise TraceError(
            f"{name}: its column {unknown[0]} has a part that the format does not know"
        )


def has_null(array: pa.Array) -> bool:
    """Whether values inside of lists or structs are null; our writers never write such nulls."""
    if pa.types.is_list(array.type):
        parts = [array.flatten()]
    elif pa.types.is_struct(array.type):
        parts = array.flatten()
    else:
        return False
    return any(part.null_count or has_null(part) for part in parts)


def _leaves(path: str, type_: pa.DataType, repeated: int) -> Iterator[tuple[str, _Type]]:
    """Paths and types of a column's leaves."""
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
    """Example: 'INT32 (UINT_32) in 1 list'."""
    logical = "" if kind.logical == "NONE" else f" ({kind.logical})"
    lists = f" in {kind.repeated} list{'s' * (kind.repeated > 1)}" if kind.repeated else ""
    return f"{kind.physical}{logical}{lists}"


def _of(found: dict[str, _Type], path: str) -> str:
    top = path.partition(".")[0]
    return ", ".join(sorted(other for other in found if other.partition(".")[0] == top))
