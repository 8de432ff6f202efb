"""Routes that the trainer recorded (R2), one file per pipeline stage and dp rank, joined."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.store import Store
from pipeline.traces.format.chunks import read_table
from pipeline.traces.format.digests import digest_of_canonical
from pipeline.traces.format.header import Header, read_header, same_source
from pipeline.traces.format.ids import named
from pipeline.traces.format.manifest import Manifest, file_of, read_manifest, refs_of
from pipeline.traces.format.schema import MANIFEST, SEGMENT
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.reader import read_slices

_SAMPLES_AT_ONCE = 64


def used_routes(store: Store, step: int) -> Manifest:
    """Read a sealed step with the routes that its training used.

    These are the routes that the trainer recorded (R2) if it recorded any, else those of the
    manifest. The former have no digests: see `digested`.
    Raises TraceError unless the trainer's files hold every sample once in every layer.
    """
    manifest = read_manifest(store, step)
    headers = training_headers(store, step)
    return joined(store, manifest, headers) if headers else manifest


def training_headers(store: Store, step: int) -> list[Header]:
    """Read the commits of the routes that a step's trainer recorded, by stage and dp rank."""
    found = [info.key for info in store.list(keys.trainings(step)) if info.key.endswith(".json")]
    return [read_training(store, step, key) for key in found]


def read_training(store: Store, step: int, key: str) -> Header:
    """Read one commit. Raises the errors of `read_header`; TraceError if it is misplaced."""
    header = read_header(store, key)
    place: dict[str, Any] = {name: header.body.get(name) for name in ("step", "stage", "dp_rank")}
    if not all(isinstance(number, int) for number in place.values()) or key != keys.training(
        **place
    ):
        raise TraceError(f"{key} in {store.uri}: it is the commit of {place}")
    return header


def joined(store: Store, manifest: Manifest, headers: Sequence[Header]) -> Manifest:
    """Replace a manifest's routes by the trainer's. Raises TraceError like `used_routes`."""
    whole = _whole_geometry(headers)
    parts: dict[str, list[dict[str, Any]]] = {id: [] for id in manifest.ids}
    layers: dict[str, list[int]] = {id: [] for id in manifest.ids}
    # Routes of the other kind, which the engine recorded for an audit, are left out of the join.
    places = manifest.rows["samples"].to_pylist()
    kept = sorted({place["file"] for place in places})
    places = [{**place, "file": kept.index(place["file"])} for place in places]
    files = [manifest.files[number] for number in kept]
    stages: dict[tuple[int, ...], int] = {}
    for header in headers:
        stages.setdefault(_geometry(header).layers, len(files))
        for id, segments in _segments_of(store, header).items():
            if id not in parts:
                raise TraceError(f"{header.key}: sample {id} is not in the step's manifest")
            parts[id].append({"file": len(files), "segments": segments})
            layers[id] += _geometry(header).layers
        files += refs_of(header)
    for id, rows in zip(manifest.ids, manifest.rows["rows_total"].to_pylist(), strict=True):
        if rows == 0:  # a sample of one token has no segment, so it gets an empty part per stage
            parts[id] = [{"file": number, "segments": []} for number in stages.values()]
            layers[id] = [layer for of_stage in stages for layer in of_stage]
    bad = [id for id in manifest.ids if sorted(layers[id]) != list(whole.layers)]
    if bad:
        raise TraceError(
            f"{keys.trainings(manifest.step)} in {store.uri}: sample {bad[0]} has routes of layers "
            f"{sorted(layers[bad[0]])}, expected {list(whole.layers)}, each once; "
            f"{named('such samples', bad)}"
        )
    table = _with(manifest.rows, "samples", places)
    table = _with(table, "routes", [parts[id] for id in manifest.ids])
    for unknown in ("routes_digest", "rows_valid"):
        table = _with(table, unknown, [None] * len(table))
    return replace(
        manifest,
        geometry=whole,
        provenance=headers[0].provenance,
        files=tuple(files),
        rows=table,
    )


def digested(store: Store, manifest: Manifest) -> Manifest:
    """Add digests and numbers of valid rows, which need all stages, to a joined manifest.

    Every row is read. A manifest that has its digests is returned unchanged.
    """
    if manifest.geometry is None or not manifest.rows["routes_digest"].null_count:
        return manifest
    digests, valid = [], []
    for start in range(0, len(manifest.ids), _SAMPLES_AT_ONCE):
        ids = manifest.ids[start : start + _SAMPLES_AT_ONCE]
        slices = read_slices(store, manifest, ids)
        for id in ids:
            routes = slices.joined(id)
            digests.append(digest_of_canonical(routes, manifest.geometry))
            valid.append(int(routes.valid_T.sum()))
    table = _with(_with(manifest.rows, "routes_digest", digests), "rows_valid", valid)
    return replace(manifest, rows=table)


def _segments_of(store: Store, header: Header) -> dict[str, list[dict[str, int]]]:
    """Segments of the commit's routes file by sample."""
    file = file_of(header, "routes")
    if file is None:
        raise TraceError(f"{header.key} in {store.uri}: it lists no routes file")
    columns = pa.schema([SEGMENT.field("owner"), SEGMENT.field("tokens")])
    owners, tokens = (column.to_pylist() for column in read_table(store, file, columns).columns)
    places: dict[str, list[dict[str, int]]] = {}
    for row, owner in enumerate(owners):
        places.setdefault(owner, []).append({"row": row, "tokens": tokens[row]})
    return places


def _whole_geometry(headers: Sequence[Header]) -> Geometry:
    first = _geometry(headers[0])
    for header in headers:
        found = _geometry(header)
        if (found.experts, found.topk) != (first.experts, first.topk):
            raise TraceError(f"{header.key}: {found}, but {headers[0].key} has {first}")
        same_source(header, headers[0])
    layers = sorted({layer for header in headers for layer in _geometry(header).layers})
    return Geometry(first.experts, first.topk, tuple(layers))


def _geometry(header: Header) -> Geometry:
    if header.geometry is None:
        raise TraceError(f"{header.key}: it names no geometry")
    return header.geometry


def _with(rows: pa.Table, name: str, values: list[Any]) -> pa.Table:
    column = pa.array(values, MANIFEST.field(name).type)
    return rows.set_column(rows.schema.get_field_index(name), MANIFEST.field(name), column)
