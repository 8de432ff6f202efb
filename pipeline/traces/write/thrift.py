"""Encoder for the parts of Thrift's compact protocol that Parquet files with flat columns need.

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
    """Encode a signed number of at most 64 bits."""
    return varint(number << 1 if number >= 0 else ~(number << 1))


def int32(number: int) -> Value:
    """Return an i32, the type that also encodes enumeration values."""
    return Value(5, zigzag(number))


def int64(number: int) -> Value:
    """Return an i64."""
    return Value(6, zigzag(number))


def text(value: str) -> Value:
    """Return a text, encoded as UTF-8."""
    data = value.encode()
    return Value(8, varint(len(data)) + data)


def struct(fields: Mapping[int, Value | None]) -> Value:
    """Return a struct of the fields whose value is not None. Field numbers must ascend."""
    found, last = bytearray(), 0
    for number, value in fields.items():
        if value is not None:
            found.append((number - last) << 4 | value.kind)  # no gap in numbers exceeds 15
            found += value.content
            last = number
    found.append(0)
    return Value(12, bytes(found))


def listed(values: Sequence[Value]) -> Value:
    """Return a list of values of one type. An empty list has the element type struct."""
    size, kind = len(values), values[0].kind if values else 12
    head = bytes([size << 4 | kind]) if size < 15 else bytes([0xF0 | kind]) + varint(size)
    return Value(9, head + b"".join(value.content for value in values))
