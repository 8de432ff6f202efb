"""Segments: the rows of a routes file. Each holds some consecutive positions of a sample.

The rows of a prompt that all samples of a group have in common are stored once, in a segment that
the group owns; the rest of a sample's rows are in a segment of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.traces.codec import gaps, pack
from pipeline.traces.digests import validity_bits
from pipeline.traces.records import Geometry, Routes, Sample
from pipeline.traces.schema import layer_column, routes_schema

ROW_GROUP_TOKENS = 32_768
"""Row groups are cut at the first segment that reaches it: 2.3 B per token-layer; 2.6 at 4k."""


@dataclass(frozen=True)
class Segment:
    """Consecutive rows. Example: Segment(owner='000003/17', token_start=0, routes=...)."""

    owner: str
    """A sample's id; a group's: the rows are those of all its samples."""
    token_start: int
    """The position of the first row."""
    routes: Routes
    """Canonical, of these rows alone."""


def cut(samples: Sequence[Sample], routes: Mapping[str, Routes]) -> "Cut":
    """Cut the canonical routes of samples into segments, a group's shared prompt first."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    segments: list[Segment] = []
    rows_of: dict[str, list[int]] = {}
    for group, members in groups.items():
        shared = _shared_rows(members, [routes[member.id] for member in members])
        common = []
        if shared:
            segments.append(Segment(group, 0, _slice(routes[members[0].id], 0, shared)))
            common = [len(segments) - 1]
        for member in members:
            whole = routes[member.id]
            segments.append(Segment(member.id, shared, _slice(whole, shared, len(whole.valid_T))))
            rows_of[member.id] = [*common, len(segments) - 1]
    return Cut(segments, rows_of)


@dataclass(frozen=True)
class Cut:
    """The segments of a file."""

    segments: list[Segment]
    rows_of: dict[str, list[int]]
    """Of each sample, the rows of the file that hold its segments, in order of position."""


def tables(segments: Sequence[Segment], geometry: Geometry) -> Iterator[pa.Table]:
    """The row groups of a routes file."""
    pending: list[Segment] = []
    tokens = 0
    for segment in segments:
        pending.append(segment)
        tokens += len(segment.routes.valid_T)
        if tokens >= ROW_GROUP_TOKENS:
            yield _table(pending, geometry)
            pending, tokens = [], 0
    if pending:
        yield _table(pending, geometry)


def _table(segments: Sequence[Segment], geometry: Geometry) -> pa.Table:
    coded: list[list[bytes]] = [[] for _ in geometry.layers]
    for segment in segments:
        # Layers outermost, so that each segment's rows of a layer lie together in memory.
        gaps_LTK = gaps(np.ascontiguousarray(segment.routes.sets_TLK.swapaxes(0, 1)))
        for column, gaps_TK in zip(coded, gaps_LTK, strict=True):
            column.append(pack(gaps_TK))
    valid = [segment.routes.valid_T for segment in segments]
    columns = {
        "owner": [segment.owner for segment in segments],
        "token_start": [segment.token_start for segment in segments],
        "tokens": [len(valid_T) for valid_T in valid],
        "validity": [None if valid_T.all() else validity_bits(valid_T) for valid_T in valid],
        **dict(zip(map(layer_column, geometry.layers), coded, strict=True)),
    }
    return pa.table(columns, schema=routes_schema(geometry))


def _shared_rows(members: Sequence[Sample], routes: Sequence[Routes]) -> int:
    """Length of the longest prefix of prompt rows that is equal in all samples of a group."""
    first = members[0].prompt_tokens_P
    if len(members) < 2 or any(not np.array_equal(first, m.prompt_tokens_P) for m in members):
        return 0
    shared = min(len(first), *(len(r.valid_T) for r in routes))
    for other in routes[1:]:
        differs_T = routes[0].valid_T[:shared] != other.valid_T[:shared]
        differs_T |= (routes[0].sets_TLK[:shared] != other.sets_TLK[:shared]).any(axis=(1, 2))
        if differs_T.any():
            shared = int(differs_T.argmax())
    return shared


def _slice(routes: Routes, start: int, end: int) -> Routes:
    return Routes(routes.sets_TLK[start:end], routes.valid_T[start:end])
