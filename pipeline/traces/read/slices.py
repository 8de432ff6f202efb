"""Routes of samples, joined from the segments that hold them.

Nothing is trusted: segments name their owner and position, coded sets are bounded, and the rows of
a sample must be exactly its positions, once in every layer. They may lie in several files: layers,
where pipeline stages recorded them; positions, where context-parallel ranks did.

Letters: T rows of a sample, L wanted layers, K experts per row, N rows of several segments.
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
    """Fetched routes of some samples."""

    geometry: Geometry
    """Geometry with the wanted layers only."""
    parts: Mapping[int, Part]
    """Parts by the file's number in the manifest."""
    rows: Mapping[str, dict[str, Any]]
    """Manifest rows by sample id."""
    whole: bool
    """Whether every layer of the step is wanted, so that the digest can be compared."""

    def routes(self, id: str) -> Routes:
        """The routes of one sample, compared with the sample's row in the manifest.

        Raises TraceError, naming file and sample.
        """
        return self._compared(id, self.joined(id))

    def joined(self, id: str) -> Routes:
        """The canonical routes of one sample, of which only the parts are compared with digests.

        Raises the errors of `routes`.
        """
        row = self.rows[id]
        T = row["rows_total"]
        held = self._held(id, row)
        by_holders = _by_holders(self.geometry.layers, held)
        # Check what covers the rows before allocating: a wrong T may be huge.
        for layers, parts in by_holders.items():
            _check_covered(id, layers, parts, T)
        # As in the file, a layer's rows are contiguous, so they are copied in one piece.
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
        if np.count_nonzero(valid_T) != T:  # all() takes 10 times as long for few
            sets_LTK[:, ~valid_T] = np.arange(self.geometry.topk)
        for part in held:
            self._compare_part(id, part, sets_LTK, valid_T)
        return Routes(sets_LTK.swapaxes(0, 1), valid_T)

    def _held(self, id: str, row: Mapping[str, Any]) -> list["_Held"]:
        """What the fetched parts hold of a sample, part by part."""
        located = row["routes"] or []
        digests = row.get("part_digests") or [None] * len(located)
        if len(digests) != len(located):
            raise TraceError(f"sample {id}: {len(digests)} part_digests of {len(located)} parts")
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
        """Compare the digest of a part of which every layer and row was read."""
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
                f"{part.key}: sample {id}: its routes of layers {list(layers)} have digest "
                f"{found[:16]}..., expected {held.digest[:16]}...; remake the step"
            )

    def _compared(self, id: str, routes: Routes) -> Routes:
        expected = self.rows[id]
        valid = int(np.count_nonzero(routes.valid_T))
        if expected["rows_valid"] not in (None, valid):
            raise TraceError(
                f"sample {id}: {valid} valid rows, its manifest says {expected['rows_valid']}"
            )
        # A join of the trainer's files has digests of its parts; the whole has none.
        if self.whole and expected["routes_digest"] is not None:
            found = digest_of_canonical(routes, self.geometry)
            if found != expected["routes_digest"]:
                raise TraceError(
                    f"sample {id}: its routes have digest {found[:16]}..., the manifest says "
                    f"{str(expected['routes_digest'])[:16]}...; remake the step"
                )
        return routes


@dataclass(frozen=True)
class _Held:
    """What a part holds of a sample."""

    part: Part
    places: Sequence[tuple[slice, slice]]
    """Positions of the sample, ascending, and the rows of the part that hold them."""
    digest: str | None
    """The routes digest of all that the part's file holds of the sample, if it is known."""


def _places(
    part: Part, id: str, row: Mapping[str, Any], located: Sequence[Mapping[str, int]]
) -> list[tuple[slice, slice]]:
    """Pair positions of a sample, which must ascend, with their rows in a part."""
    places = []
    position = 0
    for place in located:
        segment, tokens = part.segments[place["row"]], place["tokens"]
        if segment.owner not in (id, row["group"], row["branch_of"] or id):
            raise TraceError(f"{part.key}: sample {id}: a segment of {segment.owner}")
        if segment.token_start < position:
            raise TraceError(
                f"{part.key}: sample {id}: a segment from position {segment.token_start}, "
                f"expected from {position} or later"
            )
        start, length = segment.rows.start, segment.rows.stop - segment.rows.start
        if not 0 < tokens <= length:
            raise TraceError(f"{part.key}: sample {id}: {tokens} tokens of a segment of {length}")
        position = segment.token_start + tokens
        if segment.owner == row["group"] and position > row["prompt_length"]:
            raise TraceError(
                f"{part.key}: sample {id}: positions up to {position - 1} from its group "
                f"{segment.owner}, expected those of its prompt of {row['prompt_length']} tokens"
            )
        places.append((slice(segment.token_start, position), slice(start, start + tokens)))
    return places


def _by_holders(
    layers: tuple[int, ...], held: Sequence[_Held]
) -> dict[tuple[int, ...], list[_Held]]:
    """Layers with the parts that hold their rows: usually one, more where rows were cut."""
    if len(held) == 1 and held[0].part.layers == layers:
        return {layers: list(held)}
    by_parts: dict[tuple[int, ...], list[int]] = {}
    for layer in layers:
        holders = tuple(i for i, part in enumerate(held) if layer in part.part.layers)
        by_parts.setdefault(holders, []).append(layer)
    return {tuple(mine): [held[i] for i in holders] for holders, mine in by_parts.items()}


def _check_covered(id: str, layers: Sequence[int], parts: Sequence[_Held], rows: int) -> None:
    """Raise TraceError unless the parts together hold each of a sample's positions once."""
    if not parts:
        if rows == 0:
            return  # a sample of one token: a stream opens no file for it alone
        raise TraceError(f"sample {id}: no routes of layers {sorted(layers)}")
    places = [(to.start, to.stop) for part in parts for to, _ in part.places]
    problem = uncovered(places, rows)
    if problem is not None:
        files = ", ".join(part.part.key for part in parts)
        raise TraceError(f"{files}: sample {id}: {problem}, in layers {sorted(layers)}")


@cache
def _columns(layers: tuple[int, ...], of: tuple[int, ...]) -> slice | list[int]:
    """Where layers stand among others; a slice, which is faster, if it can be."""
    places = [of.index(layer) for layer in layers]
    neighbours = slice(places[0], places[-1] + 1) if places else slice(0)
    return neighbours if places == [*range(len(of))][neighbours] else places
