"""The rows of a routes file: segments, each with some consecutive positions of a sample.

The prompt rows of a group's first sample are in segments that the group owns. Every other sample
shares the leading ones that equal its own rows, and has the rest in segments of its own. A pair
(row, tokens) names a segment and how many of its first tokens belong to the sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.traces.format.codec import (
    Coding,
    has_gaps,
    ids_bytes,
    pack,
    row_bytes,
    stored_lengths,
    take_gaps,
)
from pipeline.traces.format.digests import validity_bits
from pipeline.traces.format.types import Routes
from pipeline.traces.write.routes_file import RoutesFile, Segments

ROW_GROUP_TOKENS = 32_768
"""Limit per row group and segment: 2.2 bytes per token-layer; 2.3 at half the limit, 2.5 at 4k."""


@dataclass(frozen=True)
class SegmentRef:
    """Rows of a sample in a routes file. Example: SegmentRef(row=4, tokens=812)."""

    row: int
    """Row of the file, that is, the segment."""
    tokens: int
    """Number of the segment's first tokens."""


@dataclass(frozen=True)
class _Segment:
    owner: str
    token_start: int
    sets_LTK: npt.NDArray[Any]
    valid_T: npt.NDArray[np.bool_]


class SegmentWriter:
    """Cuts canonical routes into segments, and segments into the row groups of a routes file."""

    def __init__(self, file: RoutesFile) -> None:
        self._file = file
        self._pending: list[_Segment] = []
        self._tokens = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the unwritten row group."""
        return sum(segment.sets_LTK.nbytes for segment in self._pending)

    def add(self, owner: str, routes: Routes, start: int, end: int) -> list[SegmentRef]:
        """Append rows [start, end) of a sample and return their segments."""
        places = []
        while start < end:
            room = ROW_GROUP_TOKENS - self._tokens
            # Better a row group that is not full than a sample cut across two.
            if room < end - start and self._half_full:
                self._cut()
                continue
            stop = min(end, start + room)
            self._append(owner, routes, start, stop)
            places.append(SegmentRef(self._file.rows + len(self._pending) - 1, stop - start))
            if self._tokens == ROW_GROUP_TOKENS:
                self._cut()
            start = stop
        return places

    def end_group(self) -> None:
        """End a group: the next segments belong to another one.

        A row group that is half full is written, so that a rank that reads some groups of a step
        fetches few tokens of other groups.
        """
        if self._half_full:
            self._cut()

    def finish(self) -> None:
        """Write the last row group. The caller finishes the file."""
        if self._pending:
            self._cut()

    @property
    def _half_full(self) -> bool:
        return self._tokens >= ROW_GROUP_TOKENS // 2

    def _append(self, owner: str, routes: Routes, start: int, stop: int) -> None:
        sets_LTK = routes.sets_TLK[start:stop].swapaxes(0, 1)
        self._pending.append(_Segment(owner, start, sets_LTK, routes.valid_T[start:stop]))
        self._tokens += stop - start

    def _cut(self) -> None:
        self._file.write(_rows(self._pending, self._file.geometry, self._file.coding))
        self._pending, self._tokens = [], 0


def shared_rows(first: Routes, other: Routes, limit: int) -> int:
    """Count the leading rows, at most `limit`, that two recordings have in common."""
    if limit == 0:
        return 0
    differs_TLK = first.sets_TLK[:limit] != other.sets_TLK[:limit]
    differs_T = first.valid_T[:limit] != other.valid_T[:limit]
    # any() takes 10 times as long for few.
    if not np.count_nonzero(differs_TLK) and not np.count_nonzero(differs_T):
        return limit
    return int((differs_T | differs_TLK.any(axis=(1, 2))).argmax())


def _rows(segments: Sequence[_Segment], geometry: Geometry, stored: Coding) -> Segments:
    tokens = [len(segment.valid_T) for segment in segments]
    width = row_bytes(geometry.topk, geometry.experts)
    lengths = np.frombuffer(stored_lengths([width * n for n in tokens]), np.uint8)
    L, N, K = len(geometry.layers), sum(tokens), geometry.topk
    pages_LX = np.empty((L, len(lengths) + width * N), np.uint8)
    pages_LX[:, : len(lengths)] = lengths
    coded_LX = pages_LX[:, len(lengths) :]
    direct = geometry.dtype == np.uint8
    sets_LNK = coded_LX.reshape(L, N, K) if direct else np.empty((L, N, K), geometry.dtype)
    # Left to itself, numpy would keep the order in memory that the parts have.
    np.concatenate([segment.sets_LTK for segment in segments], axis=1, out=sets_LNK)
    if has_gaps(stored, geometry.experts):
        for sets_NK in sets_LNK:
            take_gaps(sets_NK)
        if not direct:
            coded_LX[:] = pack(sets_LNK, tokens)
    elif not direct:
        coded_LX[:] = ids_bytes(sets_LNK).reshape(L, -1)
    valid = [segment.valid_T for segment in segments]
    return Segments(
        owner=[segment.owner for segment in segments],
        token_start=[segment.token_start for segment in segments],
        tokens=tokens,
        validity=[
            None if np.count_nonzero(valid_T) == n else validity_bits(valid_T)
            for valid_T, n in zip(valid, tokens, strict=True)
        ],
        pages_LX=pages_LX,
    )
