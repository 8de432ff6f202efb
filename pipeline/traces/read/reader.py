"""Slices of a sealed step: only the requested layers of the requested samples are fetched."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from pipeline.errors import cut
from pipeline.model.geometry import Geometry
from pipeline.run.commit import DataFile, read_data
from pipeline.store import Store
from pipeline.threads import in_threads
from pipeline.traces.format.chunks import TraceFile, describe, read_footer, read_table
from pipeline.traces.format.domain import check_layers, check_names
from pipeline.traces.format.manifest import Manifest, check_manifest, open_file
from pipeline.traces.format.schema import SAMPLES
from pipeline.traces.format.types import Routes, Sample, TraceError
from pipeline.traces.read.parts import Part, read_part, read_rows
from pipeline.traces.read.rows import sample_at
from pipeline.traces.read.slices import Slices

COMPARED = (
    *("id", "group", "prompt_id", "policy_version", "prompt_length", "response_length"),
    *("token_digest", "rows_total", "reward", "reward_error", "branch_of"),
)
"""Columns that must be equal in the samples file and in the manifest."""
_TOGETHER = 32
"""The number of samples whose routes a thread joins in one task."""


def read_samples(store: Store, manifest: Manifest, ids: Iterable[str]) -> list[Sample]:
    """Read samples, leaving out their routes, and compare their tokens with their digests.

    Args:
        store: The store that contains the step.
        manifest: The sealed step.
        ids: The samples to read.

    Returns:
        The samples in the order of `ids`.

    Raises:
        ObjectMissingError: A commit or file is missing.
        CorruptObjectError: A commit or file is damaged.
        TraceError: An id is unknown or is not a str, or the content of a file is invalid. In the
            second case, the message names the file and the sample.
    """
    step = check_manifest(manifest, "read_samples").step
    ids = check_names(ids, f"step {step}: ids")
    wanted = manifest.select(ids).select([*COMPARED, "samples"]).to_pylist()
    found: dict[str, Sample] = {}
    for number in sorted({row["samples"]["file"] for row in wanted}):
        file, _ = open_file(store, manifest, number)
        here = [row for row in wanted if row["samples"]["file"] == number]
        found.update((sample.id, sample) for sample in samples_of(store, file, here))
    return [found[id] for id in ids]


def every_sample(store: Store, manifest: Manifest) -> Iterator[Sample]:
    """Yield all samples of a step without their routes, file by file.

    Each row group is read once, and only one is in memory at a time. Raises the same errors as
    `read_samples`.
    """
    numbers = pc.struct_field(manifest.rows["samples"], "file")
    for number in sorted(pc.unique(numbers).to_pylist()):
        file, _ = open_file(store, manifest, number)
        rows = manifest.rows.filter(pc.equal(numbers, number)).select([*COMPARED, "samples"])
        yield from samples_of(store, file, rows.to_pylist())


def samples_of(
    store: Store, file: TraceFile, rows: Sequence[Mapping[str, Any]], footer: bytes | None = None
) -> Iterator[Sample]:
    """Yield the samples of the given manifest rows from one file, one row group at a time.

    Args:
        store: The store that contains the file.
        file: The samples file as described in its commit.
        rows: Manifest rows with the columns COMPARED and `samples`.
        footer: Checked footer from `read_footer`; None fetches the footer.

    Raises:
        ObjectMissingError: The file is missing.
        CorruptObjectError: The file is damaged.
        TraceError: The content of the file is invalid; the message names the file and the sample.
    """
    groups = file.groups_of([row["samples"]["row"] for row in rows]).tolist()
    by_group: dict[int, list[Mapping[str, Any]]] = {}
    for row, group in zip(rows, groups, strict=True):
        by_group.setdefault(group, []).append(row)
    footer = footer or read_footer(store, file)
    for of_group in by_group.values():
        places = [row["samples"]["row"] for row in of_group]
        table, at = read_rows(store, file, places, SAMPLES, None, footer)
        for row, place in zip(of_group, places, strict=True):
            for name in COMPARED:
                _same(file.data.key, row["id"], name, table[name][at[place]].as_py(), row[name])
            yield sample_at(table, at[place], file.data.key)


def read_sample_file(store: Store, file: DataFile) -> list[Sample]:
    """Read all samples from a validation's file (see `write_samples`), and check its digest."""
    described = describe(read_data(store, file), file, "samples")
    found: list[Sample] = []
    for group in range(len(described.row_groups)):
        table = read_table(store, described, SAMPLES, [group])
        found += (sample_at(table, i, file.key) for i in range(len(table)))
    return found


def read_routes(
    store: Store, manifest: Manifest, ids: Iterable[str], layers: Iterable[int] | None = None
) -> dict[str, Routes]:
    """Read the routes of samples.

    Only the bytes of the given layers are fetched. If all layers are read, the routes are compared
    with the digest in the manifest.

    Args:
        store: The store that contains the step.
        manifest: The sealed step.
        ids: The samples whose routes are read.
        layers: Model indices of L layers; None reads all.

    Returns:
        Routes with sets [T, L, K], keyed by sample id. The layers are in the given order.

    Raises:
        ObjectMissingError: A commit or file is missing.
        CorruptObjectError: A commit or file is damaged.
        TraceError: An id or a layer is unknown or malformed, or the content of a file is invalid.
            In the second case, the message names the file and the sample.
    """
    step = check_manifest(manifest, "read_routes").step
    ids = check_names(ids, f"step {step}: ids")
    slices = read_slices(store, manifest, ids, layers)
    cuts = range(0, len(ids), _TOGETHER)
    found = in_threads(lambda i: [slices.routes(id) for id in ids[i : i + _TOGETHER]], cuts)
    return dict(zip(ids, itertools.chain(*found), strict=True))


def read_slices(
    store: Store, manifest: Manifest, ids: Sequence[str], layers: Iterable[int] | None = None
) -> Slices:
    """Fetch and decode the slices that `read_routes` joins.

    Args:
        store: The store that contains the step.
        manifest: The sealed step.
        ids: The samples whose routes are read.
        layers: Model indices of the layers to read; None reads all.

    Raises:
        ObjectMissingError: A commit or file is missing.
        CorruptObjectError: A commit or file is damaged.
        TraceError: The content of a file is invalid. Samples are checked only when they are joined.
    """
    if manifest.geometry is None:
        raise TraceError(f"step {manifest.step}: no routes in its samples")
    known = manifest.geometry.layers
    where = f"step {manifest.step}: layers"
    wanted = known if layers is None else check_layers(layers, where)
    if unknown := sorted(set(wanted) - set(known)):
        raise TraceError(
            f"step {manifest.step}: no routes for layers {unknown}, expected layers of {known}"
        )
    if not wanted or len(set(wanted)) != len(wanted):
        raise TraceError(f"{where} {list(wanted)}, expected at least one, and each once")
    rows = {row["id"]: row for row in manifest.select(ids).to_pylist()}
    segments: dict[int, set[int]] = {}
    for row in rows.values():
        for part in row["routes"] or []:
            rows_of_part = segments.setdefault(part["file"], set())
            rows_of_part.update(place["row"] for place in part["segments"])
    parts: dict[int, Part] = {}
    for number in sorted(segments):
        file, geometry = open_file(store, manifest, number)
        if geometry is None:
            raise TraceError(f"{file.data.key}: no geometry in its commit")
        here = [layer for layer in wanted if layer in geometry.layers]
        if here:
            parts[number] = read_part(store, file, geometry, here, sorted(segments[number]))
    of_wanted = Geometry(manifest.geometry.experts, manifest.geometry.topk, wanted)
    return Slices(of_wanted, parts, rows, whole=set(wanted) == set(known))


def _same(key: str, id: str, name: str, found: Any, expected: Any) -> None:
    both_nan = found != found and expected != expected  # `check_sample` refuses such a reward
    if found != expected and not both_nan:
        raise TraceError(
            f"{key}: sample {id}: {name} is {cut(found)}, but the manifest records "
            f"{cut(expected)}; restore the object or remake the step"
        )
