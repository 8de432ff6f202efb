"""Bounds on what a Parquet file may grow to, checked before it is decoded.

Digests show that nothing changed, not that it was sane from the start: a few bytes can claim a
thousand million values, and a Parquet library makes room for them first. So the headers of the
pages that are about to be decoded are read here, and what they claim is compared with bounds that
follow from the stored bytes. docs/trace-format.md has the bounds.
"""

import functools
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.traces.format.types import TraceError

MOST_RATIO = 64
"""Decoded bytes, and values of a column, for each stored byte of a row group. What a row group of a
right writer holds is taken at any ratio, as one token or one set may fill it:"""
FEW_VALUES = 1 << 22
FEW_BYTES = 256 << 20
"""Of all columns that are read but those of coded sets, which may have FEW_TOKENS rows each."""
FEW_TOKENS = 32_768

_MAGIC = b"PAR1"
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3  # types of pages
_OWN_HEADER = {_DATA: 5, _DICTIONARY: 7, _DATA_2: 8}
"""By type of page, the field of the page header that holds what is said of that type alone."""
_DELTA_LENGTH_BYTE_ARRAY = 6
_DELTA_BYTE_ARRAY = 7
"""The encoding whose values share their beginnings: they may be much longer than their page."""
_UNCOMPRESSED = 0
_CODECS = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_DEEPEST = 16
"""Structs and lists in one another: in a footer 8, of the definition and what may join it."""


class StoredGroup(NamedTuple):
    """A row group that is about to be decoded. Example: StoredGroup(0, 7341, {0: (4, b'...')})."""

    number: int
    size: int
    """Bytes of all its chunks in the file, also of those that are not read."""
    chunks: Mapping[int, tuple[int, bytes]]
    """By number of the leaf column: offset and content of the chunks that are read."""


class StoredChunk(NamedTuple):
    """What a footer claims of a column chunk. Example: StoredChunk(6, 512, 4, 8_192)."""

    codec: int
    """As numbered in Parquet's definition: 6 is zstd."""
    values: int
    offset: int
    """Where its first page begins in the file; 0 when it has no page."""
    length: int
    """Bytes, compressed."""


class Page(NamedTuple):
    """What the header of a page claims. Example: Page(0, 8192, 512, 40, 8, 21)."""

    kind: int
    size: int
    """Bytes, decompressed."""
    stored: int
    """Bytes, compressed."""
    values: int
    encoding: int
    start: int
    """Where the stored bytes begin in their chunk."""


def footer_metadata(footer: bytes, row_groups: int, leaves: Sequence[str]) -> pq.FileMetaData:
    """Parse a footer, whose lists may not be longer than a file of these row groups and leaves has.

    Raises ValueError, OSError or ArrowException when it cannot be parsed.
    """
    if len(footer) < 8 or int.from_bytes(footer[-8:-4], "little") + 8 != len(footer):
        raise ValueError(f"a footer of {len(footer)} bytes says that it has another length")
    nodes = {path for leaf in leaves for path in itertools.accumulate(leaf.split("."), _below)}
    with pq.ParquetFile(
        io.BytesIO(_MAGIC + footer),
        thrift_container_size_limit=max(row_groups, len(nodes) + 1, 64),
        thrift_string_size_limit=len(footer),
    ) as parquet:
        return parquet.metadata


@functools.lru_cache(16)  # slices of one file are read with one footer
def stored_chunks(footer: bytes, leaves: int) -> tuple[tuple[StoredChunk, ...], ...]:
    """Read what a footer claims of each column chunk, by row group and leaf column.

    pyarrow 26 ends the process (std::terminate) when `RowGroupMetaData.column` meets an unknown
    codec or level histograms of a wrong size, so its metadata cannot be used for this. The numbers
    of fields are those of `FileMetaData` in apache/parquet-format's parquet.thrift. Raises
    ValueError when the footer is not as defined there, or a row group has other than `leaves`
    columns.
    """
    try:
        whole, _ = _struct(footer, 0, _DEEPEST)
    except IndexError as error:
        raise ValueError("the footer ends within a value") from error
    groups = [_members(group, 1) for group in _members(whole, 4)]
    if any(len(columns) != leaves for columns in groups):
        raise ValueError(f"a row group of other than {leaves} columns")
    return tuple(tuple(map(_stored_chunk, columns)) for columns in groups)


def _stored_chunk(column: "_Struct") -> StoredChunk:
    described = column.get(3)
    if not isinstance(described, dict):
        raise ValueError("a column chunk without metadata")
    codec, values, length, start = (_whole(described, field) for field in (4, 5, 7, 9))
    # A chunk without values may have a dictionary page alone: then its data begin nowhere, at 0.
    start = _whole(described, 11) if 11 in described else start
    return StoredChunk(codec, values, start, length)


def check_pages(
    metadata: pq.FileMetaData,
    footer: bytes,
    groups: Sequence[StoredGroup],
    row_bytes: int,
    name: str,
) -> tuple[list[str], int]:
    """Refuse row groups that would grow beyond the bounds when they are decoded.

    `row_bytes`: bytes of a coded row of all layers that are read. Returns the paths of texts that
    are to be read as dictionaries, as only their values show how long they get, and the bytes that
    they may have: see `check_texts`. Raises TraceError.
    """
    doubtful: set[str] = set()
    most = 0
    described = stored_chunks(footer, metadata.num_columns)
    for group in groups:
        limit = max(FEW_BYTES + FEW_TOKENS * row_bytes, MOST_RATIO * group.size)
        most += limit
        decoded = 0
        for leaf, (offset, content) in group.chunks.items():
            column, chunk = metadata.schema.column(leaf), described[group.number][leaf]
            try:
                if (chunk.offset, chunk.length) != (offset, len(content)):
                    raise TraceError("its place in the footer is not that in its commit")
                pages, values = _pages(content, chunk.values), chunk.values
                decoded += _decoded(pages, values, group.size)
                if decoded > limit:
                    raise TraceError(
                        f"{group.size} stored bytes become {decoded} or more, expected at most "
                        f"{limit}"
                    )
                if column.physical_type == "BYTE_ARRAY":
                    if _shared(pages) * values > limit:
                        raise TraceError("its texts, of shared beginnings, may be too long")
                    longest = _longest(pages, content, chunk.codec, values, limit)
                    if longest * values > limit:
                        doubtful.add(column.path)
            except TraceError as error:
                what = f"{name}: row group {group.number}, column {column.path}"
                raise TraceError(f"{what}: {error}") from error
    return sorted(doubtful), most


def check_texts(table: pa.Table, doubtful: Sequence[str], most: int, name: str) -> None:
    """Refuse columns, read as dictionaries, whose texts are too long all together."""
    for path in doubtful:
        if path not in table.schema.names or not pa.types.is_dictionary(table[path].type):
            raise TraceError(f"{name}: the texts of {path} may become too long to be read")
        for chunk in table[path].chunks:
            lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
            found = pc.sum(lengths.cast(pa.int64())).as_py() or 0
            if found > most:
                raise TraceError(f"{name}: {found} bytes of {path}, expected at most {most}")


def _decoded(pages: Sequence[Page], values: int, stored: int) -> int:
    """The bytes that a chunk of a row group of `stored` bytes becomes, references resolved."""
    if values > max(FEW_VALUES, MOST_RATIO * stored):
        raise TraceError(
            f"{values} values in a row group of {stored} bytes, more than {FEW_VALUES} and than "
            f"{MOST_RATIO} for each byte"
        )
    return sum(page.size for page in pages) + 8 * values


def _pages(content: bytes, values: int) -> list[Page]:
    try:
        return list(walk_pages(content, values))
    except (IndexError, ValueError) as error:
        raise TraceError(f"its pages are not as expected: {error}") from error


def walk_pages(chunk: bytes, values: int) -> Iterator[Page]:
    """Yield the pages of a column chunk of `values` values, by their headers alone.

    Raises ValueError or IndexError when they are not laid one after the other up to its end.
    """
    at = left = 0
    while at < len(chunk):
        header, at = _struct(chunk, at, _DEEPEST)
        kind, size, stored = (_whole(header, field) for field in (1, 2, 3))
        own = header.get(_OWN_HEADER.get(kind, -1))
        if not isinstance(own, dict):
            raise ValueError(f"a page of type {kind}")
        encoding = _whole(own, 4 if kind == _DATA_2 else 2)
        page = Page(kind, size, stored, _whole(own, 1), encoding, at)
        left += page.values if kind != _DICTIONARY else 0
        at += stored
        if left > values or at > len(chunk):
            raise ValueError(f"{left} of {values} values, {at} of {len(chunk)} bytes")
        yield page
    if left != values:
        raise ValueError(f"{left} of {values} values")


def page_bytes(described: StoredChunk, chunk: bytes) -> memoryview | None:
    """The content of a chunk of one uncompressed page: lengths, then values; None: it is not so."""
    if described.codec != _UNCOMPRESSED:
        return None
    pages = list(walk_pages(chunk, described.values))
    is_so = [(page.kind, page.encoding) for page in pages] == [(_DATA, _DELTA_LENGTH_BYTE_ARRAY)]
    return memoryview(chunk)[pages[0].start :] if is_so else None


def _below(path: str, name: str) -> str:
    return f"{path}.{name}"


def _longest(pages: Sequence[Page], chunk: bytes, codec: int, values: int, most: int) -> int:
    """A length in bytes that no text of a chunk's dictionary exceeds."""
    bounds = [0]
    for page in pages:
        if page.kind == _DICTIONARY:
            is_few = page.size * values <= most
            bounds.append(page.size if is_few else _longest_of(page, chunk, codec))
    return max(bounds)


def _shared(pages: Sequence[Page]) -> int:
    """A length in bytes that no text exceeds whose beginning is that of the text before."""
    return max((page.size for page in pages if page.encoding == _DELTA_BYTE_ARRAY), default=0)


def _longest_of(page: Page, chunk: bytes, codec: int) -> int:
    """The length in bytes of the longest text of a dictionary page (PLAIN: lengths and bytes)."""
    content = chunk[page.start : page.start + page.stored]
    if codec != _UNCOMPRESSED:
        known = _CODECS.get(codec, "unknown")
        if not pa.Codec.is_available(known):
            return page.size
        content = pa.Codec(known).decompress(content, page.size).to_pybytes()
    at = longest = 0
    while at + 4 <= len(content):
        length = int.from_bytes(content[at : at + 4], "little")
        longest = max(longest, length)
        at += 4 + length
    return longest


_Value: TypeAlias = "int | _Struct | list[_Value] | None"
_Struct = dict[int, _Value]


def _whole(struct: _Struct, field: int) -> int:
    value = struct.get(field)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"field {field} of a page header or column chunk is {value!r}")
    return value


def _members(struct: _Struct, field: int) -> list[_Struct]:
    value = struct.get(field)
    if not isinstance(value, list):
        raise ValueError(f"field {field} of the footer or of a row group is not a list")
    structs = [member for member in value if isinstance(member, dict)]
    if len(structs) != len(value):
        raise ValueError(f"field {field} of the footer or of a row group is a list of other things")
    return structs


def _struct(data: bytes, at: int, depth: int) -> tuple[_Struct, int]:
    """A struct of Thrift's compact protocol: its values by field, and its end."""
    found: _Struct = {}
    field = 0
    while head := data[at]:
        at += 1
        if step := head >> 4:
            field += step
        else:
            number, at = _varint(data, at)
            field = number >> 1 ^ -(number & 1)
        value, at = _value(data, at, head & 15, depth)
        if field in found:  # which one counts, readers decide differently
            raise ValueError(f"field {field} twice in a page header or footer")
        found[field] = value
    return found, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[_Value, int]:
    """A value and its end; None for what nothing here asks for: booleans, texts, floats."""
    if kind in (5, 6, 4):  # i32, i64, i16
        number, at = _varint(data, at)
        return number >> 1 ^ -(number & 1), at
    if kind == 8:  # binary
        length, at = _varint(data, at)
        return None, at + length
    if kind in (9, 10, 12) and not depth:
        raise ValueError("structs and lists lie too deep in one another")
    if kind == 12:
        return _struct(data, at, depth - 1)
    if kind in (9, 10):  # list, set
        return _list(data, at, depth - 1)
    if kind in (1, 2):  # true and false have no content
        return None, at
    if kind in (3, 7):  # i8, double
        return None, at + (1 if kind == 3 else 8)
    raise ValueError(f"a value of type {kind} in a page header or footer")


def _list(data: bytes, at: int, depth: int) -> tuple[list[_Value], int]:
    head, at = data[at], at + 1
    kind, count = head & 15, head >> 4
    if count == 15:
        count, at = _varint(data, at)
    # A boolean has a byte of its own in a list, as all others have, so the data bound the count.
    if count > len(data) - at:
        raise ValueError(f"a list of {count} values in {len(data) - at} bytes")
    found = []
    for _ in range(count):
        value, at = _value(data, at, 3 if kind in (1, 2) else kind, depth)
        found.append(value)
    return found, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits in a page header or footer")
