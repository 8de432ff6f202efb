"""The check that several files together contain each position of a sample exactly once."""

from collections.abc import Iterable


def uncovered(places: Iterable[tuple[int, int]], rows: int) -> str | None:
    """Return why ranges [start, end) do not cover each of a sample's rows once; None if they do."""
    position = 0
    for start, end in sorted(places):
        if start != position:
            problem = "is duplicated" if start < position else "is missing"
            return f"position {min(start, position)} {problem}"
        position = end
    if position != rows:
        return f"{position} rows of routes, expected {rows}: one per token except the last"
    return None
