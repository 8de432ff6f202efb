"""Thrift's compact protocol, as much of it as a Parquet file of flat columns needs.

Source: apache/parquet-format, Thrift.md and src/main/thrift/parquet.thrift.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeline.traces.format.codec import varint


class Value(NamedTuple):
    """A value and its type in the protocol. Example: Value(5, b'\\x02') is the i32 1."""

    kind: int
    content: bytes


def zigzag(number: int) -> bytes:
    """A signed number of at most 64 bits."""
    return varint(number << 1 if number >= 0 else ~(number << 1))


def int32(number: int) -> Value:
    """Also for the values of enumerations."""
    return Value(5, zigzag(number))


def int64(number: int) -> Value:
    """See the protocol."""
    return Value(6, zigzag(number))


def text(value: str) -> Value:
    """UTF-8."""
    data = value.encode()
    return Value(8, varint(len(data)) + data)


def struct(fields: Mapping[int, Value | None]) -> Value:
    """Fields by number, ascending; those that are None are left out."""
    found, last = bytearray(), 0
    for number, value in fields.items():
        if value is not None:
            found.append((number - last) << 4 | value.kind)  # Parquet's numbers are near each other
            found += value.content
            last = number
    found.append(0)
    return Value(12, bytes(found))


def listed(values: Sequence[Value]) -> Value:
    """Values of one type; none: a list of structs."""
    size, kind = len(values), values[0].kind if values else 12
    head = bytes([size << 4 | kind]) if size < 15 else bytes([0xF0 | kind]) + varint(size)
    return Value(9, head + b"".join(value.content for value in values))
