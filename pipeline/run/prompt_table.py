"""The staged table of prompts: its columns, its origin, and a reader of single rows.

The table is a Parquet file with small row groups, so that a reader fetches and decodes only the
groups of the rows that it needs. The file's metadata describes its origin: the prompt files and the
settings from which it was made. Later starts compare their own files and settings with the origin,
so they need not make the table again.
"""

import hashlib
import io
import itertools
import json
import mmap
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.run.commit import CorruptObjectError, DataFile
from pipeline.store.base import Store

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.int64()),
        ("messages", pa.string()),
        ("token_ids", pa.list_(pa.uint32())),
        ("data_source", pa.string()),
        ("ground_truth", pa.string()),
        ("extra_info", pa.string()),
    ]
)
_ROW = "prompt_id"
_MAGIC = b"PAR1"
_ORIGIN = b"retrace.origin"
_TAIL = 8
"""Bytes after the footer: its length and the magic."""
_GROUPS_AT_ONCE = 32
_ROWS_AT_ONCE = 4_096
_SPARSE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_UNREADABLE = (pa.ArrowException, OSError, KeyError, ValueError, IndexError)

ReadRanges = Callable[[Sequence[tuple[int, int]]], list[bytes]]
"""Returns the bytes of each (offset, length) of a file."""


@dataclass(frozen=True)
class Origin:
    """The files and settings from which a table of prompts was made, and what was found."""

    files: list[str]
    """The SHA-256 of each prompt file, in order."""
    stamps: list[str | None]
    """For each file in a remote store, its place, size and time; None for a local file."""
    recipe: Mapping[str, Any]
    """The values of the settings, and the SHA-256 of the model's files, that determine the tokens.
    """
    rows_sha256: str
    """The digest of the rows of the files: messages, data source, ground truth and extra_info."""
    tokens_sha256: str
    """The digest of the tokens of the table's rows."""
    rows: int
    """Rows of the table."""
    dropped: int
    """Prompts that were left out because they are longer than max_prompt_length."""
    cut: int
    """Prompts that were cut to max_prompt_length tokens."""
    tokens: int
    """Tokens of all prompts in the table."""
    largest_token: int
    unscored: list[tuple[str, str, int]]
    """File, data source and number of the prompts for which there is no built-in scorer."""

    def same_prompts(self, other: "Origin") -> bool:
        """Return whether two tables come from the same rows and settings, or have the same tokens.

        If the chat template reads the clock, the tokens differ although rows and settings do not.
        """
        tokens = (self.rows, self.tokens_sha256) == (other.rows, other.tokens_sha256)
        return self.rows_sha256 == other.rows_sha256 and (tokens or self.recipe == other.recipe)

    def metadata(self) -> dict[bytes, bytes]:
        """Return the metadata to store in the table's file."""
        return {_ORIGIN: json.dumps(asdict(self)).encode()}


def row_bytes(messages: str, source: str, ground_truth: str, extra_info: str | None) -> bytes:
    """Return the part of a row that `Origin.rows_sha256` covers.

    Args:
        messages: As in the column of this name, like the parameters below.
        source: The data source.
        ground_truth: JSON.
        extra_info: JSON; None for null.
    """
    return "\0".join((messages, source, ground_truth, extra_info or "", "")).encode()


class StoredPrompts:
    """A table of prompts in a store or in a temporary file, read by row."""

    def __init__(self, name: str, size: int, ranges: ReadRanges) -> None:
        """Read the footer of a table.

        Args:
            name: The table's name in messages.
            size: The size of the file in bytes.
            ranges: Reads the file.

        Raises:
            CorruptObjectError: The file is not a table of prompts.
        """
        self.name = name
        self._size = size
        self._ranges = ranges
        try:
            [tail] = ranges([(size - _TAIL, _TAIL)])
            length = int.from_bytes(tail[:4], "little") + _TAIL
            [footer] = ranges([(size - length, length)])
            self._metadata = pq.read_metadata(io.BytesIO(_MAGIC + footer))
        except _UNREADABLE as error:
            raise self._damaged(error) from error
        groups = range(self._metadata.num_row_groups)
        rows = (self._metadata.row_group(group).num_rows for group in groups)
        self._firsts = list(itertools.accumulate(rows, initial=0))

    @classmethod
    def of(cls, store: Store, file: DataFile) -> "StoredPrompts":
        """Return a staged table. Raises StoreError."""
        return cls(file.key, file.size, partial(store.read_ranges, file.key, size=file.size))

    @property
    def rows(self) -> int:
        """The number of prompts."""
        return int(self._firsts[-1])

    @property
    def origin(self) -> Origin | None:
        """The table's origin; None if a different release of Retrace made the table."""
        found = (self._metadata.metadata or {}).get(_ORIGIN)
        try:
            return None if found is None else Origin(**json.loads(found))
        except (TypeError, ValueError):
            return None

    def read(self, rows: Iterable[int], columns: Sequence[str]) -> pa.Table:
        """Read some rows, in ascending order, with the column prompt_id and those in `columns`.

        Raises CorruptObjectError if the table is damaged. Raises StoreError.
        """
        wanted: defaultdict[int, list[int]] = defaultdict(list)
        for row in sorted(set(rows)):
            wanted[bisect_right(self._firsts, row) - 1].append(row)
        columns, groups = [_ROW, *columns], list(wanted)
        tables = [pa.schema([SCHEMA.field(name) for name in columns]).empty_table()]
        try:
            for first in range(0, len(groups), _GROUPS_AT_ONCE):
                some = {group: wanted[group] for group in groups[first : first + _GROUPS_AT_ONCE]}
                tables += self._rows_of(some, columns)
            return pa.concat_tables(tables)
        except _UNREADABLE as error:
            raise self._damaged(error) from error

    def rows_sha256(self) -> str:
        """Return the digest of all rows, for a table without an origin.

        It equals `Origin.rows_sha256` if no prompt was dropped. Raises CorruptObjectError and
        StoreError.
        """
        digest = hashlib.sha256()
        columns = ("messages", "data_source", "ground_truth", "extra_info")
        for first in range(0, self.rows, _ROWS_AT_ONCE):
            rows = range(first, min(first + _ROWS_AT_ONCE, self.rows))
            for row in self.read(rows, columns).to_pylist():
                digest.update(row_bytes(*(row[name] for name in columns)))
        return digest.hexdigest()

    def tokens(self, names: Iterable[str]) -> dict[str, npt.NDArray[np.uint32]]:
        """Read the token ids of rows, keyed by name; other names are left out.

        The name of row 17 is '17'. Raises CorruptObjectError and StoreError.
        """
        rows = (int(name) for name in names if name.isascii() and name.isdecimal())
        table = self.read((row for row in rows if row < self.rows), ["token_ids"])
        ids = (each.values.to_numpy() for each in table["token_ids"])
        return dict(zip(map(str, table[_ROW].to_pylist()), ids, strict=True))

    def _rows_of(
        self, wanted: Mapping[int, list[int]], columns: Sequence[str]
    ) -> Iterator[pa.Table]:
        """Yield rows of a few row groups, which `wanted` lists."""
        ranges = [self._range(group, columns) for group in wanted]
        # Only the pages of memory that contain these ranges exist.
        sparse = mmap.mmap(-1, self._size, _SPARSE)
        for (offset, length), data in zip(ranges, self._ranges(ranges), strict=True):
            sparse[offset : offset + length] = data
        source = pa.BufferReader(pa.py_buffer(sparse))
        with pq.ParquetFile(
            source, metadata=self._metadata, page_checksum_verification=True
        ) as file:
            for group, rows in wanted.items():
                table = file.read_row_group(group, columns, use_threads=False)
                table = table.take([row - self._firsts[group] for row in rows])
                if table[_ROW].to_pylist() != rows:
                    raise ValueError(f"row group {group} has other rows than {rows}")
                yield table

    def _range(self, group: int, columns: Sequence[str]) -> tuple[int, int]:
        """Return the offset and length of the part of a row group that contains these columns."""
        described = self._metadata.row_group(group)
        chunks = [described.column(i) for i in range(described.num_columns)]
        chunks = [one for one in chunks if one.path_in_schema.split(".")[0] in columns]
        starts = [one.dictionary_page_offset or one.data_page_offset for one in chunks]
        ends = [s + one.total_compressed_size for s, one in zip(starts, chunks, strict=True)]
        return min(starts), max(ends) - min(starts)

    def _damaged(self, error: Exception) -> CorruptObjectError:
        return CorruptObjectError(
            f"{self.name}: not a table of prompts: {error}; restore the object"
        )
