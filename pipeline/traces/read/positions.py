"""The positions of a sample that some files hold together."""

from collections.abc import Iterable


def uncovered(places: Iterable[tuple[int, int]], rows: int) -> str | None:
    """Why ranges [start, end) of positions do not hold each row of a sample once; None: they do."""
    position = 0
    for start, end in sorted(places):
        if start != position:
            problem = "is there twice" if start < position else "is missing"
            return f"position {min(start, position)} {problem}"
        position = end
    if position != rows:
        return f"{position} rows of routes, expected {rows}: one per token but the last"
    return None
