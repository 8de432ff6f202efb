"""Joining the routes of samples from the segments that contain them.

No stored value is trusted. Each segment must have the expected owner and a possible position,
expert ids must be in range, and a sample's rows must cover each of its positions exactly once in
every layer. The rows may be in several files: one per pipeline stage, with different layers, or one
per context-parallel rank, with different positions.

Dimensions: T is the number of rows in a sample, L the number of selected layers, K the number of
experts per row, and N the number of rows in several segments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.traces.format.digests import digest_of_canonical
from pipeline.traces.format.types import Routes, TraceError
from pipeline.traces.read.parts import Part
from pipeline.traces.read.positions import uncovered


@dataclass(frozen=True)
class Slices:
    """The fetched routes of some samples."""

    geometry: Geometry
    """Geometry with only the selected layers."""
    parts: Mapping[int, Part]
    """Parts, keyed by the file's index in the manifest."""
    rows: Mapping[str, dict[str, Any]]
    """Manifest rows, keyed by sample id."""
    whole: bool
    """Whether every layer is selected, in any order. Only then can routes be compared with a
    sample's digest."""

    def routes(self, id: str) -> Routes:
        """Return the routes of a sample, checked against the sample's row in the manifest.

        Raises a TraceError that names the file and the sample.
        """
        return self._compared(id, self.joined(id))

    def joined(self, id: str) -> Routes:
        """Return the canonical routes of a sample, after comparing each part with its digest.

        The digest of the entire sample is not checked. Raises a TraceError that names the file and
        the sample.
        """
        row = self.rows[id]
        T = row["rows_total"]
        held = self._held(id, row)
        by_holders = _by_holders(self.geometry.layers, held)
        # Check the positions before allocating, because a wrong T may be huge.
        for layers, parts in by_holders.items():
            _check_covered(id, layers, parts, T)
        # A layer's rows are contiguous, as in the file, so they can be copied in one piece.
        sets_LTK = np.empty((len(self.geometry.layers), T, self.geometry.topk), self.geometry.dtype)
        valid_T = np.empty(T, np.bool_)
        for number, (layers, parts) in enumerate(by_holders.items()):
            here_T = np.empty(T, np.bool_)
            columns = _columns(layers, self.geometry.layers)
            for part in parts:
                for to, rows in part.places:
                    here_T[to] = part.part.valid_N[rows]
                    sets_LTK[columns, to] = part.part.sets_LNK[
                        _columns(layers, part.part.layers), rows
                    ]
            if number and not np.array_equal(valid_T, here_T):
                raise TraceError(
                    f"{parts[0].part.key}: sample {id}: valid rows differ between its files"
                )
            valid_T = here_T
        if np.count_nonzero(valid_T) != T:  # all() takes 10 times as long for few rows
            sets_LTK[:, ~valid_T] = np.arange(self.geometry.topk)
        for part in held:
            self._compare_part(id, part, sets_LTK, valid_T)
        return Routes(sets_LTK.swapaxes(0, 1), valid_T)

    def _held(self, id: str, row: Mapping[str, Any]) -> list["_Held"]:
        """Return the rows of a sample in the fetched parts, part by part."""
        located = row["routes"] or []
        digests = row.get("part_digests") or [None] * len(located)
        if len(digests) != len(located):
            raise TraceError(f"sample {id}: {len(digests)} part_digests, expected {len(located)}")
        return [
            _Held(part, _places(part, id, row, here["segments"]), digest)
            for here, digest in zip(located, digests, strict=True)
            if (part := self.parts.get(here["file"])) is not None
        ]

    def _compare_part(
        self,
        id: str,
        held: "_Held",
        sets_LTK: npt.NDArray[Any],
        valid_T: npt.NDArray[np.bool_],
    ) -> None:
        """Compare a part with its digest, if the digest is known and all layers were read."""
        part = held.part
        if held.digest is None or not part.whole:
            return
        layers = tuple(sorted(part.layers))
        positions = [np.arange(to.start, to.stop) for to, _ in held.places]
        at_T = np.concatenate([np.empty(0, np.int64), *positions])
        at_L = np.array([self.geometry.layers.index(layer) for layer in layers])
        routes = Routes(sets_LTK[at_L[:, None], at_T].swapaxes(0, 1), valid_T[at_T])
        geometry = Geometry(self.geometry.experts, self.geometry.topk, layers)
        found = digest_of_canonical(routes, geometry)
        if found != held.digest:
            raise TraceError(
                f"{part.key}: sample {id}: its routes for layers {list(layers)} have digest "
                f"{found[:16]}..., expected {held.digest[:16]}...; remake the step"
            )

    def _compared(self, id: str, routes: Routes) -> Routes:
        expected = self.rows[id]
        valid = int(np.count_nonzero(routes.valid_T))
        if expected["rows_valid"] not in (None, valid):
            raise TraceError(
                f"sample {id}: {valid} valid rows, but its manifest records "
                f"{expected['rows_valid']}"
            )
        # Once the trainer's files are joined, each part has a digest, but the sample may have none.
        if self.whole and expected["routes_digest"] is not None:
            found = self._digest(routes)
            if found != expected["routes_digest"]:
                raise TraceError(
                    f"sample {id}: its routes have digest {found[:16]}..., but the manifest "
                    f"records {str(expected['routes_digest'])[:16]}...; remake the step"
                )
        return routes

    def _digest(self, routes: Routes) -> str:
        """Return the digest of routes with all layers, which covers them in ascending order."""
        layers, ascending = self.geometry.layers, tuple(sorted(self.geometry.layers))
        if layers == ascending:
            return digest_of_canonical(routes, self.geometry)
        sets_TLK = routes.sets_TLK[:, _columns(ascending, layers)]
        geometry = Geometry(self.geometry.experts, self.geometry.topk, ascending)
        return digest_of_canonical(Routes(sets_TLK, routes.valid_T), geometry)


@dataclass(frozen=True)
class _Held:
    """The rows of a sample in one part."""

    part: Part
    places: Sequence[tuple[slice, slice]]
    """Slices of the sample's positions in ascending order, each paired with the slice of the part's
    rows for these positions."""
    digest: str | None
    """The routes digest of the sample's rows in the part's file; None if unknown."""


def _places(
    part: Part, id: str, row: Mapping[str, Any], located: Sequence[Mapping[str, int]]
) -> list[tuple[slice, slice]]:
    """Return the slices of a sample's positions that a part contains.

    Each slice is paired with the slice of the part's rows for these positions. Raises TraceError if
    the positions do not ascend.
    """
    places = []
    position = 0
    for place in located:
        segment, tokens = part.segments[place["row"]], place["tokens"]
        if segment.owner not in (id, row["group"], row["branch_of"] or id):
            raise TraceError(
                f"{part.key}: sample {id}: a segment of {segment.owner}, expected the sample's own"
            )
        if segment.token_start < position:
            raise TraceError(
                f"{part.key}: sample {id}: a segment from position {segment.token_start}, "
                f"expected from {position} or later"
            )
        start, length = segment.rows.start, segment.rows.stop - segment.rows.start
        if not 0 < tokens <= length:
            raise TraceError(
                f"{part.key}: sample {id}: {tokens} tokens from a segment of {length} tokens"
            )
        position = segment.token_start + tokens
        if segment.owner == row["group"] and position > row["prompt_length"]:
            raise TraceError(
                f"{part.key}: sample {id}: positions up to {position - 1} from its group "
                f"{segment.owner}, expected only its prompt of {row['prompt_length']} tokens"
            )
        places.append((slice(segment.token_start, position), slice(start, start + tokens)))
    return places


def _by_holders(
    layers: tuple[int, ...], held: Sequence[_Held]
) -> dict[tuple[int, ...], list[_Held]]:
    """Return groups of layers, each with the parts that contain its rows.

    A group of layers has several parts if the sample's rows are split across several files.
    """
    if len(held) == 1 and held[0].part.layers == layers:
        return {layers: list(held)}
    by_parts: dict[tuple[int, ...], list[int]] = {}
    for layer in layers:
        holders = tuple(i for i, part in enumerate(held) if layer in part.part.layers)
        by_parts.setdefault(holders, []).append(layer)
    return {tuple(mine): [held[i] for i in holders] for holders, mine in by_parts.items()}


def _check_covered(id: str, layers: Sequence[int], parts: Sequence[_Held], rows: int) -> None:
    """Raise TraceError unless the parts together contain each position of a sample once."""
    if not parts:
        if rows == 0:
            return  # a sample of one token: a stream does not open a file for it
        raise TraceError(f"sample {id}: no routes for layers {sorted(layers)}")
    places = [(to.start, to.stop) for part in parts for to, _ in part.places]
    problem = uncovered(places, rows)
    if problem is not None:
        files = ", ".join(part.part.key for part in parts)
        raise TraceError(f"{files}: sample {id}: {problem}, in layers {sorted(layers)}")


@cache
def _columns(layers: tuple[int, ...], of: tuple[int, ...]) -> slice | list[int]:
    """Return the indices of layers in the tuple `of`, if possible as a slice to save time."""
    places = [of.index(layer) for layer in layers]
    neighbours = slice(places[0], places[-1] + 1) if places else slice(0)
    return neighbours if places == [*range(len(of))][neighbours] else places
