"""Planning the requests for byte ranges: neighbours share a request, and large ranges are split."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PIECE = 8 << 20
"""Maximum number of bytes per request. Larger ranges are fetched in several pieces in parallel."""
_FREE_GAP = 4 << 10
_GAP_SHARE = 20
"""Gaps between neighbours are also fetched, up to max(1/20 of the requested bytes, 4 KiB).

A separate request would take longer than fetching the gap. However, reading a slice must not fetch
more than 1.1 times the slice's own size."""


@dataclass(frozen=True)
class Span:
    """Neighbouring ranges, fetched together. Example: Span(100, 400, ((2, 100, 50), ...))."""

    offset: int
    end: int
    members: tuple[tuple[int, int, int], ...]
    """Index, offset and length of each range."""

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the (offset, end) of each request."""
        for start in range(self.offset, self.end, PIECE):
            yield start, min(start + PIECE, self.end)


def spans(ranges: Sequence[tuple[int, int]]) -> list[Span]:
    """Return the spans that together cover all (offset, length) ranges, sorted by offset.

    Empty ranges need no span.
    """
    found: list[Span] = []
    order = sorted((offset, length, n) for n, (offset, length) in enumerate(ranges) if length)
    wanted = wasted = 0
    for offset, length, n in order:
        last = found[-1] if found else Span(offset, offset, ())
        end, gap = max(last.end, offset + length), max(0, offset - last.end)
        most = max(_FREE_GAP, (wanted + length) // _GAP_SHARE)
        if found and end - last.offset <= PIECE and wasted + gap <= most:
            found[-1] = Span(last.offset, end, (*last.members, (n, offset, length)))
            wanted, wasted = wanted + length, wasted + gap
        else:
            found.append(Span(offset, offset + length, ((n, offset, length),)))
            wanted, wasted = length, 0
    return found
