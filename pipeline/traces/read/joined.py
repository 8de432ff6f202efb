"""A sealed step with the routes that its training used: the manifest joined with a training set.

The set must contain every sample exactly once in every layer. A sample's rows may be in several
files, because pipeline stages have different layers and context-parallel ranks have different
positions.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.run import keys
from pipeline.store import Store
from pipeline.traces.format.chunks import TraceFile, read_table
from pipeline.traces.format.digests import digest_of_canonical, valid_rows
from pipeline.traces.format.header import Header
from pipeline.traces.format.ids import named
from pipeline.traces.format.manifest import (
    Commits,
    Manifest,
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
    routes_file,
)


@dataclass
class _Part:
    """The part of a sample's rows that one commit of a training set contains."""

    commit: int
    """The index of the commit in the set."""
    recorded: Recorded | None
    """The commit's entry for the sample; None in format 1.0, which has no entries."""
    segments: list[dict[str, int]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """The positions [start, end) of the segments."""
    invalid: set[int] = field(default_factory=set)
    """The positions whose rows are not valid."""

    @property
    def rows(self) -> int:
        return sum(end - start for start, end in self.places)


def used_routes(store: Store, step: int) -> Manifest:
    """Read a sealed step with the routes that its training used.

    If the trainer records routes (R2), these replace the manifest's routes. The rows of a sample
    may then be in several parts. In this case, each part has a digest but the entire sample does
    not; `digested` adds the samples' digests. Raises TraceError if the trainer has not recorded the
    routes yet, or if its files do not contain every sample exactly once in every layer.
    """
    manifest = read_manifest(store, step)
    found = find_training_set(store, manifest)
    return manifest if found is None else joined(store, manifest, found)


def joined(store: Store, manifest: Manifest, training: TrainingSet) -> Manifest:
    """Return a manifest in which the trainer's routes replace the original ones.

    Args:
        store: The store that contains the step.
        manifest: The sealed step.
        training: The step's training set.

    Raises:
        TraceError: The set's files do not contain every sample exactly once in every layer.
    """
    if manifest.geometry not in (None, training.geometry):
        raise TraceError(
            f"{training.name}: routes for {training.geometry}, but {keys.manifest(manifest.step)} "
            f"has {manifest.geometry}; remake the step"
        )
    parts = _parts(store, manifest, training)
    _check_whole(manifest, training, parts)
    # The result leaves out the engine's routes (R3), which may have been recorded for an audit.
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
    """Return a joined manifest, with each sample's routes digest and valid row count added.

    Computing these values requires the routes of all pipeline stages, so every part is read and
    compared with its digest. A manifest that already contains the samples' digests is returned
    unchanged.
    """
    if manifest.geometry is None or not manifest.rows["routes_digest"].null_count:
        return manifest
    digests, valid = [], []
    for ids in manifest.id_batches():
        slices = read_slices(store, manifest, ids)
        for id in ids:
            routes = slices.routes(id)
            digests.append(digest_of_canonical(routes, manifest.geometry))
            valid.append(int(routes.valid_T.sum()))
    table = _with(_with(manifest.rows, "routes_digest", digests), "rows_valid", valid)
    return replace(manifest, rows=table)


def _samples_files(store: Store, manifest: Manifest, used: Collection[int]) -> list[int]:
    """Return the indices of all files that contain samples.

    These are the files to which the manifest's rows refer, and the samples files of shards that
    contain only rejected groups, because these files are also part of the step.
    """
    commits = Commits(store)
    unused = set(range(len(manifest.files))) - set(used) if manifest.rejected else set()
    others = {n for n in unused if open_file(store, manifest, n, commits)[0].role == "samples"}
    return sorted({*used, *others})


def _columns(
    parts: Sequence[_Part], numbers: Sequence[int], with_first: Collection[int]
) -> dict[str, Any]:
    """Return the columns of a manifest row that locate and describe a sample's routes.

    `numbers` are the indices of the commits' routes files. Valid rows are counted only in the first
    MoE layer, because the count is the same in every layer. `with_first` lists the commits that
    contain this layer.
    """
    columns: dict[str, Any] = dict.fromkeys(("routes_digest", "part_digests", "rows_valid"))
    columns["routes"] = [
        {"file": numbers[part.commit], "segments": part.segments} for part in parts
    ]
    said = [(part.commit, part.recorded) for part in parts if part.recorded is not None]
    if len(said) == len(parts):
        digests = [one.routes_digest for _, one in said]
        if len(digests) == 1:  # the part contains every layer and row
            columns["routes_digest"] = digests[0]
        else:
            columns["part_digests"] = digests
        columns["rows_valid"] = sum(one.rows_valid for n, one in said if n in with_first)
    return columns


def _parts(store: Store, manifest: Manifest, training: TrainingSet) -> dict[str, list[_Part]]:
    """Return the parts of each sample of the manifest, one per commit that contains its rows."""
    tokens = dict(zip(manifest.ids, manifest.rows["token_digest"].to_pylist(), strict=True))
    parts: dict[str, list[_Part]] = {id: [] for id in manifest.ids}
    for number, header in enumerate(training.commits):
        for id, part in _of_commit(store, header, routes_file(header), number).items():
            if id not in parts:
                raise TraceError(f"{header.key}: sample {id} is not in the step's manifest")
            said = part.recorded
            if said is not None and said.token_digest != tokens[id]:
                raise TraceError(
                    f"{header.key}: sample {id} has token digest {said.token_digest}, but the "
                    f"manifest records {tokens[id]}; the commit belongs to a different run: "
                    "restore the object"
                )
            parts[id].append(part)
    return parts


def check_part(store: Store, header: Header, file: TraceFile) -> None:
    """Raise TraceError unless a training commit agrees with the rows in its file.

    Args:
        store: The store that contains the file.
        header: The commit.
        file: The commit's routes file. In a recorded set that a run replays, its key differs from
            the key in the commit.
    """
    _of_commit(store, header, file, 0)


def _of_commit(store: Store, header: Header, file: TraceFile, number: int) -> dict[str, _Part]:
    """Return the parts that one commit contains, keyed by sample id."""
    said = recorded(header)
    parts = {id: _Part(number, one) for id, one in (said or {}).items()}
    columns = (column.to_pylist() for column in read_table(store, file, SEGMENT).columns)
    for row, (owner, start, n, validity) in enumerate(zip(*columns, strict=True)):
        if said is not None and owner not in said:
            raise TraceError(
                f"{file.data.key}: a segment of {owner}, expected one of the samples in "
                f"{header.key}"
            )
        if n < 1:
            raise TraceError(f"{file.data.key}: a segment of {n} tokens, expected at least 1")
        part = parts.setdefault(owner, _Part(number, None))
        part.segments.append({"row": row, "tokens": n})
        part.places.append((start, start + n))
        if validity is not None:
            valid_T = valid_rows(validity, n, file.data.key)
            part.invalid.update((start + np.flatnonzero(~valid_T)).tolist())
    for id, one in (said or {}).items():
        if parts[id].rows != one.rows:
            raise TraceError(
                f"{file.data.key}: sample {id}: {parts[id].rows} rows, but {header.key} records "
                f"{one.rows}"
            )
        valid = one.rows - len(parts[id].invalid)
        if valid != one.rows_valid:
            raise TraceError(
                f"{file.data.key}: sample {id}: {valid} valid rows, but {header.key} records "
                f"{one.rows_valid}"
            )
    return parts


def _check_whole(
    manifest: Manifest, training: TrainingSet, parts: Mapping[str, list[_Part]]
) -> None:
    """Raise TraceError unless the set contains each row of each sample once in every layer.

    A row must be valid in all layers or in none. A sample of one token has no rows. If no commit
    lists it, it receives an empty part.
    """
    holders: dict[int, tuple[int, ...]] = {}
    for layer in training.geometry.layers:
        holders[layer] = tuple(
            number
            for number, header in enumerate(training.commits)
            if layer in geometry_of(header).layers
        )
    # Layers whose rows are in the same commits, such as the layers of one pipeline stage, are
    # checked together.
    alike = sorted(set(holders.values()))
    of_commit: dict[int, list[int]] = {}
    for number, together in enumerate(alike):
        for commit in together:
            of_commit.setdefault(commit, []).append(number)
    problems: dict[str, str] = {}
    for id, rows in zip(manifest.ids, manifest.rows["rows_total"].to_pylist(), strict=True):
        places: dict[int, list[tuple[int, int]]] = {}
        invalid: dict[int, set[int]] = {}
        for part in parts[id]:
            for number in of_commit[part.commit]:
                places.setdefault(number, []).extend(part.places)
                invalid.setdefault(number, set()).update(part.invalid)
        for number, together in enumerate(alike):
            if rows == 0 and number not in places:
                parts[id].append(_Part(together[0], _nothing(training.commits[together[0]])))
                places.update((also, []) for also in of_commit[together[0]])
            problem = uncovered(places.get(number, ()), rows)
            if problem is not None:
                layers = [layer for layer, mine in holders.items() if mine == together]
                problems.setdefault(id, f"{problem}, in layers {layers}")
        if any(found != invalid.get(0, set()) for found in invalid.values()):
            problems.setdefault(id, "its valid rows differ between layers")
    for id, problem in problems.items():
        raise TraceError(
            f"{training.name}: sample {id}: {problem}; {named('samples affected', list(problems))}"
        )


def _nothing(header: Header) -> Recorded | None:
    """Return a commit's entry for a sample of one token; None in format 1.0."""
    if header.minor == 0:
        return None
    geometry = geometry_of(header)
    sets_TLK = np.empty((0, len(geometry.layers), geometry.topk), geometry.dtype)
    nothing = Routes(sets_TLK, np.empty(0, np.bool_))
    return Recorded("", digest_of_canonical(nothing, geometry), 0, 0)


def _with(rows: pa.Table, name: str, values: list[Any]) -> pa.Table:
    column = pa.array(values, MANIFEST.field(name).type)
    return rows.set_column(rows.schema.get_field_index(name), MANIFEST.field(name), column)
