"""The requests that fetch a set of byte ranges: neighbours together, large ranges in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass

PIECE = 8 << 20
"""Maximum bytes of one request. Larger ranges are fetched in pieces, several in parallel."""
_FREE_GAP = 4 << 10
_GAP_SHARE = 20
"""Gaps between neighbours are fetched too, up to 1/20 of the wanted bytes (or 4 KiB): another
request would take longer, and reading a slice must fetch at most 1.1 x its own bytes."""


@dataclass(frozen=True)
class Span:
    """Neighbouring ranges, fetched as one. Example: Span(100, 400, ((2, 100, 50), ...))."""

    offset: int
    end: int
    members: tuple[tuple[int, int, int], ...]
    """Number, offset and length of each range."""

    def pieces(self) -> list[tuple[int, int]]:
        """The (offset, end) of each request."""
        starts = range(self.offset, self.end, PIECE)
        return [(start, min(start + PIECE, self.end)) for start in starts]


def spans(ranges: Sequence[tuple[int, int]]) -> list[Span]:
    """The spans that cover each (offset, length), ascending; empty ranges need none."""
    found: list[Span] = []
    order = sorted((offset, length, n) for n, (offset, length) in enumerate(ranges) if length)
    wanted = wasted = 0
    for offset, length, n in order:
        member = (n, offset, length)
        if found:
            last = found[-1]
            end = max(last.end, offset + length)
            gap = max(0, offset - last.end)
            if end - last.offset <= PIECE and wasted + gap <= max(
                _FREE_GAP, (wanted + length) // _GAP_SHARE
            ):
                found[-1] = Span(last.offset, end, (*last.members, member))
                wanted, wasted = wanted + length, wasted + gap
                continue
        found.append(Span(offset, offset + length, (member,)))
        wanted, wasted = length, 0
    return found
