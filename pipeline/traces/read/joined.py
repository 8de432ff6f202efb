"""A sealed step with the routes that its training used: the manifest, joined with the training set.

Every sample must be in the set once in every layer. Its rows may lie in several files: of pipeline
stages, which have other layers, and of context-parallel ranks, which have other positions.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.store import Store
from pipeline.traces.format.chunks import read_table
from pipeline.traces.format.digests import digest_of_canonical
from pipeline.traces.format.header import Header
from pipeline.traces.format.ids import named
from pipeline.traces.format.manifest import (
    Commits,
    Manifest,
    file_of,
    open_file,
    read_manifest,
    refs_of,
)
from pipeline.traces.format.policies import united
from pipeline.traces.format.schema import MANIFEST, SEGMENT
from pipeline.traces.format.types import Routes, TraceError
from pipeline.traces.read.positions import uncovered
from pipeline.traces.read.reader import read_slices
from pipeline.traces.read.training import (
    Recorded,
    TrainingSet,
    find_training_set,
    geometry_of,
    recorded,
)

_SAMPLES_AT_ONCE = 64
_SEGMENTS = pa.schema([SEGMENT.field(name) for name in ("owner", "token_start", "tokens")])


@dataclass
class _Part:
    """What one commit of a training set holds of a sample."""

    commit: int
    """The number of the commit in the set."""
    recorded: Recorded | None
    """What the commit says of it; None: nothing, in format 1.0."""
    segments: list[dict[str, int]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """The positions [start, end) of its segments."""

    @property
    def rows(self) -> int:
        return sum(end - start for start, end in self.places)


def used_routes(store: Store, step: int) -> Manifest:
    """Read a sealed step with the routes that its training used.

    These are the routes that the trainer recorded (R2) if it records them, else those of the
    manifest. The former have digests by part, not by sample: see `digested`.
    Raises TraceError when the trainer has not recorded them yet, and unless its files hold every
    sample once in every layer.
    """
    manifest = read_manifest(store, step)
    found = find_training_set(store, manifest)
    return manifest if found is None else joined(store, manifest, found)


def joined(store: Store, manifest: Manifest, training: TrainingSet) -> Manifest:
    """Replace a manifest's routes by the trainer's. Raises TraceError like `used_routes`."""
    parts = _parts(store, manifest, training)
    _check_whole(manifest, training, parts)
    # Routes of the other kind, which the engine recorded for an audit, are left out of the join.
    places = manifest.rows["samples"].to_pylist()
    kept = _samples_files(store, manifest, {place["file"] for place in places})
    places = [{**place, "file": kept.index(place["file"])} for place in places]
    files = [manifest.files[number] for number in kept]
    numbers = []
    for header in training.commits:
        numbers.append(len(files))
        files += refs_of(header)
    table = _with(manifest.rows, "samples", places)
    first = training.geometry.layers[0]
    with_first = {
        number
        for number, header in enumerate(training.commits)
        if first in geometry_of(header).layers
    }
    rows = [_columns(parts[id], numbers, with_first) for id in manifest.ids]
    for name in ("routes", "routes_digest", "part_digests", "rows_valid"):
        table = _with(table, name, [row[name] for row in rows])
    return replace(
        manifest,
        geometry=training.geometry,
        provenance=training.provenance,
        policies=united([("the manifest", manifest.policies), (training.name, training.policies)]),
        files=tuple(files),
        rows=table,
    )


def digested(store: Store, manifest: Manifest) -> Manifest:
    """Add what needs all stages to a joined manifest: digests of samples, numbers of valid rows.

    Every row is read and compared with the digests of its parts. A manifest that has its digests is
    returned unchanged.
    """
    if manifest.geometry is None or not manifest.rows["routes_digest"].null_count:
        return manifest
    digests, valid = [], []
    for start in range(0, len(manifest.ids), _SAMPLES_AT_ONCE):
        ids = manifest.ids[start : start + _SAMPLES_AT_ONCE]
        slices = read_slices(store, manifest, ids)
        for id in ids:
            routes = slices.routes(id)
            digests.append(digest_of_canonical(routes, manifest.geometry))
            valid.append(int(routes.valid_T.sum()))
    table = _with(_with(manifest.rows, "routes_digest", digests), "rows_valid", valid)
    return replace(manifest, rows=table)


def _samples_files(store: Store, manifest: Manifest, used: Collection[int]) -> list[int]:
    """The numbers of all files with samples: those of the rows, and of shards of rejected groups
    alone, which are part of the step."""
    commits = Commits(store)
    unused = set(range(len(manifest.files))) - set(used) if manifest.rejected else set()
    others = {n for n in unused if open_file(store, manifest, n, commits)[0].role == "samples"}
    return sorted({*used, *others})


def _columns(
    parts: Sequence[_Part], numbers: Sequence[int], with_first: Collection[int]
) -> dict[str, Any]:
    """The columns of a manifest's row that say where a sample's routes are, and what they are.

    `numbers` are those of the commits' routes files. Valid rows are counted in the first layer, of
    which the commits `with_first` hold rows: they are the same in every layer.
    """
    columns: dict[str, Any] = dict.fromkeys(("routes_digest", "part_digests", "rows_valid"))
    columns["routes"] = [
        {"file": numbers[part.commit], "segments": part.segments} for part in parts
    ]
    said = [(part.commit, part.recorded) for part in parts if part.recorded is not None]
    if len(said) == len(parts):
        digests = [one.routes_digest for _, one in said]
        if len(digests) == 1:  # the part has every layer and row
            columns["routes_digest"] = digests[0]
        else:
            columns["part_digests"] = digests
        columns["rows_valid"] = sum(one.rows_valid for n, one in said if n in with_first)
    return columns


def _parts(store: Store, manifest: Manifest, training: TrainingSet) -> dict[str, list[_Part]]:
    """What each commit of the set holds of each sample of the manifest."""
    tokens = dict(zip(manifest.ids, manifest.rows["token_digest"].to_pylist(), strict=True))
    parts: dict[str, list[_Part]] = {id: [] for id in manifest.ids}
    for number, header in enumerate(training.commits):
        for id, part in _of_commit(store, header, number).items():
            if id not in parts:
                raise TraceError(f"{header.key}: sample {id} is not in the step's manifest")
            said = part.recorded
            if said is not None and said.token_digest != tokens[id]:
                raise TraceError(
                    f"{header.key}: sample {id} has token digest {said.token_digest}, the "
                    f"manifest says {tokens[id]}; it is of another run: restore the object"
                )
            parts[id].append(part)
    return parts


def _of_commit(store: Store, header: Header, number: int) -> dict[str, _Part]:
    """What one commit holds, by sample."""
    file = file_of(header, "routes")
    if file is None:
        raise TraceError(f"{header.key} in {store.uri}: it lists no routes file")
    said = recorded(header)
    parts = {id: _Part(number, one) for id, one in (said or {}).items()}
    owners, starts, tokens = (
        column.to_pylist() for column in read_table(store, file, _SEGMENTS).columns
    )
    for row, (owner, start, n) in enumerate(zip(owners, starts, tokens, strict=True)):
        if said is not None and owner not in said:
            raise TraceError(
                f"{file.data.key}: a segment of {owner}, of which {header.key} has no digest"
            )
        part = parts.setdefault(owner, _Part(number, None))
        part.segments.append({"row": row, "tokens": n})
        part.places.append((start, start + n))
    for id, one in (said or {}).items():
        if parts[id].rows != one.rows:
            raise TraceError(
                f"{file.data.key}: sample {id}: {parts[id].rows} rows, {header.key} says {one.rows}"
            )
    return parts


def _check_whole(
    manifest: Manifest, training: TrainingSet, parts: Mapping[str, list[_Part]]
) -> None:
    """Raise TraceError unless the set holds each row of each sample once in every layer.

    A sample of one token has no row: where no commit names it, it gets an empty part.
    """
    holders: dict[int, tuple[int, ...]] = {}
    for layer in training.geometry.layers:
        holders[layer] = tuple(
            number
            for number, header in enumerate(training.commits)
            if layer in geometry_of(header).layers
        )
    # Layers with the same holders, such as those of a pipeline stage, are as good as one.
    alike = sorted(set(holders.values()))
    of_commit: dict[int, list[int]] = {}
    for number, together in enumerate(alike):
        for commit in together:
            of_commit.setdefault(commit, []).append(number)
    problems: dict[str, str] = {}
    for id, rows in zip(manifest.ids, manifest.rows["rows_total"].to_pylist(), strict=True):
        places: dict[int, list[tuple[int, int]]] = {}
        for part in parts[id]:
            for number in of_commit[part.commit]:
                places.setdefault(number, []).extend(part.places)
        for number, together in enumerate(alike):
            if rows == 0 and number not in places:
                parts[id].append(_Part(together[0], _nothing(training.commits[together[0]])))
                places.update((also, []) for also in of_commit[together[0]])
            problem = uncovered(places.get(number, ()), rows)
            if problem is not None:
                layers = [layer for layer, mine in holders.items() if mine == together]
                problems.setdefault(id, f"{problem}, in layers {layers}")
    for id, problem in problems.items():
        raise TraceError(
            f"{training.name}: sample {id}: {problem}; {named('such samples', list(problems))}"
        )


def _nothing(header: Header) -> Recorded | None:
    """What a commit would say of a sample of one token; None: format 1.0 said nothing."""
    if header.minor == 0:
        return None
    geometry = geometry_of(header)
    sets_TLK = np.empty((0, len(geometry.layers), geometry.topk), geometry.dtype)
    nothing = Routes(sets_TLK, np.empty(0, np.bool_))
    return Recorded("", digest_of_canonical(nothing, geometry), 0, 0)


def _with(rows: pa.Table, name: str, values: list[Any]) -> pa.Table:
    column = pa.array(values, MANIFEST.field(name).type)
    return rows.set_column(rows.schema.get_field_index(name), MANIFEST.field(name), column)
