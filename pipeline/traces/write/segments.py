"""Writing the rows of a routes file. Each row is a segment: consecutive positions of a sample.

The prompt rows of a group's first sample are in segments that the group owns. Every other sample in
the group refers to these segments for the leading rows that it shares with the first sample, and
stores its remaining rows in separate segments. A SegmentRef identifies a segment, and gives the
number of tokens at the segment's start that belong to a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.traces.format.digests import validity_bits
from pipeline.traces.format.types import Routes
from pipeline.traces.write.routes_file import RoutesFile, Segments

ROW_GROUP_TOKENS = 32_512
"""Maximum number of tokens in a row group or segment. In row groups of this size, a token takes 2.2
bytes per layer. It takes 2.3 bytes at half this size, and 2.5 at 4k tokens. With 32,768 tokens, the
page of a layer with top-8 would exceed 256 KiB. In larger pages, zstd at level 1 ignores matches of
6 bytes, and some routes take 5% more bytes."""


@dataclass(frozen=True)
class SegmentRef:
    """A reference to rows of a sample in a routes file. Example: SegmentRef(row=4, tokens=812)."""

    row: int
    """The row of the file that contains the segment."""
    tokens: int
    """How many of the segment's first tokens belong to the sample."""


@dataclass(frozen=True)
class _Segment:
    owner: str
    token_start: int
    sets_LTK: npt.NDArray[Any]
    valid_T: npt.NDArray[np.bool_]


class SegmentWriter:
    """Splits canonical routes into segments, and writes these in row groups to a routes file."""

    def __init__(self, file: RoutesFile) -> None:
        self._file = file
        self._pending: list[_Segment] = []
        self._tokens = 0

    @property
    def held_bytes(self) -> int:
        """Size in bytes of the routes in the row group that is not yet written."""
        return sum(segment.sets_LTK.nbytes for segment in self._pending)

    def add(self, owner: str, routes: Routes, start: int, end: int) -> list[SegmentRef]:
        """Append rows [start, end) of a sample.

        Args:
            owner: The sample's id; for a shared prompt, the id of the group.
            routes: The sample's canonical routes.
            start: The first row to append.
            end: The row after the last one to append.

        Returns:
            The segments that contain these rows.
        """
        places = []
        while start < end:
            room = ROW_GROUP_TOKENS - self._tokens
            # Leaving a row group partly empty is better than splitting a sample between two.
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
        """End a group: the next segments belong to a different group.

        A row group that is at least half full is written now, so that a rank that reads some groups
        of a step fetches few tokens of other groups.
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
        self._file.write(_rows(self._pending, self._file.geometry))
        self._pending, self._tokens = [], 0


def shared_rows(first: Routes, other: Routes, limit: int) -> int:
    """Return the number of leading rows that two recordings have in common.

    Args:
        first: The routes of one recording.
        other: The routes of the other recording.
        limit: The maximum number of leading rows to compare.
    """
    if limit == 0:
        return 0
    differs_TLK = first.sets_TLK[:limit] != other.sets_TLK[:limit]
    differs_T = first.valid_T[:limit] != other.valid_T[:limit]
    # If there are few rows, any() takes 10 times as long.
    if not np.count_nonzero(differs_TLK) and not np.count_nonzero(differs_T):
        return limit
    return int((differs_T | differs_TLK.any(axis=(1, 2))).argmax())


def _rows(segments: Sequence[_Segment], geometry: Geometry) -> Segments:
    tokens = [len(segment.valid_T) for segment in segments]
    sets_LNK = np.empty((len(geometry.layers), sum(tokens), geometry.topk), geometry.dtype)
    # Without `out`, the result would have the memory order of the parts.
    np.concatenate([segment.sets_LTK for segment in segments], axis=1, out=sets_LNK)
    valid = [segment.valid_T for segment in segments]
    return Segments(
        owner=[segment.owner for segment in segments],
        token_start=[segment.token_start for segment in segments],
        tokens=tokens,
        validity=[
            None if np.count_nonzero(valid_T) == n else validity_bits(valid_T)
            for valid_T, n in zip(valid, tokens, strict=True)
        ],
        sets_LNK=sets_LNK,
    )
