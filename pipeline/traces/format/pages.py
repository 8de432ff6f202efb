"""Bounds on the decoded size of a Parquet file, checked before the file is decoded.

Digests show that a file did not change, but not that it was valid when it was written. A file of a
few bytes can claim to contain a billion values, and a Parquet library allocates memory for all of
them before it reads any. This module therefore reads the headers of the pages that are about to be
decoded, and compares their claims with bounds that follow from the number of stored bytes.
docs/trace-format.md lists the bounds.
"""

import functools
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.traces.format.types import TraceError

MOST_RATIO = 64
"""Maximum number of decoded bytes, and of values in a column, per stored byte of a row group.

A row group within the limits below is accepted at any ratio, because a row group may consist of
many copies of one token or one set. A correct writer's row groups are within these limits.
"""
FEW_VALUES = 1 << 22
"""Maximum number of values in a column that are accepted at any ratio."""
FEW_BYTES = 256 << 20
"""Maximum number of decoded bytes that are accepted at any ratio, over all columns that are read.
In addition, FEW_TOKENS rows are accepted for each column of coded sets."""
FEW_TOKENS = 32_768
"""Maximum number of rows of coded sets that are accepted at any ratio, in each layer."""

_MAGIC = b"PAR1"
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3  # page types
_OWN_HEADER = {_DATA: 5, _DICTIONARY: 7, _DATA_2: 8}
"""For each page type, the number of the page header field that describes pages of this type."""
_DELTA_LENGTH_BYTE_ARRAY = 6
_DELTA_BYTE_ARRAY = 7
"""An encoding in which a value can share the beginning of the previous value. The values can
therefore be much longer than their page."""
_INDEXES, _BLOOM_FILTER = {4, 6}, 14
"""Fields of a column chunk with the offsets of its page indexes, and the field of its metadata with
the offset of a Bloom filter."""
_UNCOMPRESSED = 0
_CODECS = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_DEEPEST = 16
"""Maximum nesting depth of structs and lists: 8 in today's footers, plus a margin for additions."""


class StoredGroup(NamedTuple):
    """A row group that is about to be decoded. Example: StoredGroup(0, 7341, {0: (4, b'...')})."""

    number: int
    size: int
    """Size in bytes of all its chunks in the file, including chunks that are not read."""
    chunks: Mapping[int, tuple[int, bytes]]
    """Offset and content of each chunk that is read, keyed by the index of the leaf column."""


class StoredChunk(NamedTuple):
    """A column chunk as the footer describes it. Example: StoredChunk(6, 512, 4, 8_192)."""

    codec: int
    """Number of the codec in Parquet's definition; for example, 6 is zstd."""
    values: int
    offset: int
    """Offset of the chunk's first page in the file; 0 if the chunk has no pages."""
    length: int
    """Compressed size in bytes."""
    statistics: Mapping[int, int | bytes] = MappingProxyType({})
    """The chunk's minimum, maximum and number of nulls, keyed by the field numbers of `Statistics`
    in parquet.thrift. Values are encoded as in the file."""
    has_index: bool = False
    """Whether the chunk has a page index or a Bloom filter."""


class Page(NamedTuple):
    """A page as its header describes it. Example: Page(0, 8192, 512, 40, 8, 21)."""

    kind: int
    size: int
    """Decompressed size in bytes."""
    stored: int
    """Compressed size in bytes."""
    values: int
    encoding: int
    start: int
    """Offset of the stored bytes in their chunk."""


def footer_metadata(footer: bytes, row_groups: int, leaves: Sequence[str]) -> pq.FileMetaData:
    """Parse a footer; refuse it if its lists have more entries than row groups and leaves require.

    Args:
        footer: The footer, with its length and magic bytes.
        row_groups: The number of row groups according to the file's commit.
        leaves: Paths of the leaf columns according to the file's commit.

    Raises:
        ValueError: The length that the footer states is wrong.
        OSError: The footer cannot be parsed.
        ArrowException: The footer cannot be parsed.
    """
    if len(footer) < 8 or int.from_bytes(footer[-8:-4], "little") + 8 != len(footer):
        raise ValueError(f"a footer of {len(footer)} bytes, but it states a different length")
    nodes = {path for leaf in leaves for path in itertools.accumulate(leaf.split("."), _below)}
    with pq.ParquetFile(
        io.BytesIO(_MAGIC + footer),
        thrift_container_size_limit=max(row_groups, len(nodes) + 1, 64),
        thrift_string_size_limit=len(footer),
    ) as parquet:
        return parquet.metadata


@functools.lru_cache(16)  # slices of a file share its footer
def stored_chunks(footer: bytes, leaves: int) -> tuple[tuple[StoredChunk, ...], ...]:
    """Return the footer's description of each column chunk, for each row group and leaf column.

    This function does not use pyarrow's metadata: pyarrow 26 ends the process (std::terminate) if
    `RowGroupMetaData.column` finds an unknown codec, or level histograms of the wrong size. The
    field numbers come from `FileMetaData` in apache/parquet-format's parquet.thrift. Raises
    ValueError if the footer does not follow this definition, or if a row group does not have
    `leaves` columns.
    """
    try:
        whole, _ = _struct(footer, 0, _DEEPEST)
    except IndexError as error:
        raise ValueError("the footer ends within a value") from error
    groups = [_members(group, 1) for group in _members(whole, 4)]
    if any(len(columns) != leaves for columns in groups):
        raise ValueError(f"a row group with a different number of columns, expected {leaves}")
    return tuple(tuple(map(_stored_chunk, columns)) for columns in groups)


def _stored_chunk(column: "_Struct") -> StoredChunk:
    described = column.get(3)
    if not isinstance(described, dict):
        raise ValueError("a column chunk without metadata")
    codec, values, length, start = (_whole(described, field) for field in (4, 5, 7, 9))
    # A chunk without values may consist of only a dictionary page. The offset of its data pages is
    # then 0.
    start = _whole(described, 11) if 11 in described else start
    statistics = described.get(12)
    stated = statistics.items() if isinstance(statistics, dict) else ()
    return StoredChunk(
        codec,
        values,
        start,
        length,
        {field: value for field, value in stated if isinstance(value, int | bytes)},
        has_index=not _INDEXES.isdisjoint(column) or _BLOOM_FILTER in described,
    )


def check_pages(
    metadata: pq.FileMetaData,
    footer: bytes,
    groups: Sequence[StoredGroup],
    row_bytes: int,
    name: str,
) -> tuple[list[str], int]:
    """Raise TraceError for row groups that would exceed the bounds when decoded.

    Args:
        metadata: The parsed footer.
        footer: The footer's bytes.
        groups: The row groups that are about to be decoded.
        row_bytes: Bytes per coded row, over all layers that are read.
        name: The file, for error messages.

    Returns:
        First, the paths of text columns that must be read as dictionaries, because only their
        decoded values show how long the texts are. Second, the maximum number of bytes of text in
        a chunk of these columns; see `check_texts`.
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
                    raise TraceError("its place in the footer differs from its place in the commit")
                pages, values = _pages(content, chunk.values), chunk.values
                decoded += _decoded(pages, values, group.size)
                if decoded > limit:
                    raise TraceError(
                        f"{group.size} stored bytes decode to {decoded} or more, expected at most "
                        f"{limit}"
                    )
                if column.physical_type == "BYTE_ARRAY":
                    if _shared(pages) * values > limit:
                        raise TraceError("its texts share their beginnings and may be too long")
                    longest = _longest(pages, content, chunk.codec, values, limit)
                    if longest * values > limit:
                        doubtful.add(column.path)
            except TraceError as error:
                what = f"{name}: row group {group.number}, column {column.path}"
                raise TraceError(f"{what}: {error}") from error
    return sorted(doubtful), most


def check_texts(table: pa.Table, doubtful: Sequence[str], most: int, name: str) -> None:
    """Raise TraceError if dictionary columns contain more bytes of text than allowed.

    Args:
        table: The decoded table.
        doubtful: Paths of the columns, from `check_pages`.
        most: The maximum number of bytes of text in a chunk of a column, from `check_pages`.
        name: The file, for error messages.
    """
    for path in doubtful:
        if path not in table.schema.names or not pa.types.is_dictionary(table[path].type):
            raise TraceError(f"{name}: the texts of {path} may become too long to read")
        for chunk in table[path].chunks:
            lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
            found = pc.sum(lengths.cast(pa.int64())).as_py() or 0
            if found > most:
                raise TraceError(f"{name}: {found} bytes of {path}, expected at most {most}")


def _decoded(pages: Sequence[Page], values: int, stored: int) -> int:
    """Return the decoded size of a chunk in bytes, with dictionary references resolved.

    `stored` is the number of stored bytes in the chunk's row group.
    """
    if values > max(FEW_VALUES, MOST_RATIO * stored):
        raise TraceError(
            f"{values} values in a row group of {stored} bytes, expected at most {FEW_VALUES} or "
            f"{MOST_RATIO} per byte"
        )
    return sum(page.size for page in pages) + 8 * values


def _pages(content: bytes, values: int) -> list[Page]:
    try:
        return list(walk_pages(content, values))
    except (IndexError, ValueError) as error:
        raise TraceError(f"malformed pages: {error}") from error


def walk_pages(chunk: bytes, values: int) -> Iterator[Page]:
    """Yield the pages of a column chunk of `values` values, as their headers describe them.

    Raises ValueError or IndexError unless consecutive pages fill the chunk exactly.
    """
    at = left = 0
    while at < len(chunk):
        header, at = _struct(chunk, at, _DEEPEST)
        kind, size, stored = (_whole(header, field) for field in (1, 2, 3))
        own = header.get(_OWN_HEADER.get(kind, -1))
        if not isinstance(own, dict):
            raise ValueError(f"a page of type {kind} without its header")
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
    """Return the content of a chunk that consists of one uncompressed page of lengths and values.

    Returns None for any other chunk.
    """
    if described.codec != _UNCOMPRESSED:
        return None
    pages = list(walk_pages(chunk, described.values))
    is_so = [(page.kind, page.encoding) for page in pages] == [(_DATA, _DELTA_LENGTH_BYTE_ARRAY)]
    return memoryview(chunk)[pages[0].start :] if is_so else None


def _below(path: str, name: str) -> str:
    return f"{path}.{name}"


def _longest(pages: Sequence[Page], chunk: bytes, codec: int, values: int, most: int) -> int:
    """Return an upper bound on the length in bytes of the longest text in a chunk's dictionary."""
    bounds = [0]
    for page in pages:
        if page.kind == _DICTIONARY:
            is_few = page.size * values <= most
            bounds.append(page.size if is_few else _longest_of(page, chunk, codec))
    return max(bounds)


def _shared(pages: Sequence[Page]) -> int:
    """Return an upper bound on the length of texts that can share the previous text's beginning.

    The bound is in bytes. It is 0 if no page has the encoding in which texts can do so.
    """
    return max((page.size for page in pages if page.encoding == _DELTA_BYTE_ARRAY), default=0)


def _longest_of(page: Page, chunk: bytes, codec: int) -> int:
    """Return the length in bytes of the longest text in a dictionary page.

    The page's encoding is PLAIN, in which each text's bytes follow its length.
    """
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


_Value: TypeAlias = "int | bytes | _Struct | list[_Value] | None"
_Struct = dict[int, _Value]


def _whole(struct: _Struct, field: int) -> int:
    value = struct.get(field)
    if not isinstance(value, int) or value < 0:
        raise ValueError(
            f"field {field} of a page header or column chunk is {value!r}, expected a size"
        )
    return value


def _members(struct: _Struct, field: int) -> list[_Struct]:
    value = struct.get(field)
    if not isinstance(value, list):
        raise ValueError(f"field {field} of the footer or of a row group is not a list")
    structs = [member for member in value if isinstance(member, dict)]
    if len(structs) != len(value):
        raise ValueError(f"field {field} of the footer or of a row group is not a list of structs")
    return structs


def _struct(data: bytes, at: int, depth: int) -> tuple[_Struct, int]:
    """Parse a struct of Thrift's compact protocol.

    Returns its values, keyed by field number, and the offset of its end.
    """
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
        if field in found:  # readers disagree about which value to use
            raise ValueError(f"field {field} occurs twice in a page header or footer")
        found[field] = value
    return found, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[_Value, int]:
    """Return a value and the offset of its end.

    Values of types that are not needed here (booleans, floats) become None.
    """
    if kind in (5, 6, 4):  # i32, i64, i16
        number, at = _varint(data, at)
        return number >> 1 ^ -(number & 1), at
    if kind == 8:  # binary
        length, at = _varint(data, at)
        return data[at : at + length], at + length
    if kind in (9, 10, 12) and not depth:
        raise ValueError("structs and lists are nested too deep")
    if kind == 12:
        return _struct(data, at, depth - 1)
    if kind in (9, 10):  # list, set
        return _list(data, at, depth - 1)
    if kind in (1, 2):  # true and false have no content
        return None, at
    if kind in (3, 7):  # i8, double
        return None, at + (1 if kind == 3 else 8)
    raise ValueError(f"a value of unknown type {kind} in a page header or footer")


def _list(data: bytes, at: int, depth: int) -> tuple[list[_Value], int]:
    head, at = data[at], at + 1
    kind, count = head & 15, head >> 4
    if count == 15:
        count, at = _varint(data, at)
    # In a list, every value, even a boolean, takes at least one byte. The size of the data
    # therefore limits the count.
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
