"""Writing: the samples and routes of a rollout shard, and the routes that a trainer recorded."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.store import Store, keys
from pipeline.store.commit import Committed, DataFile
from pipeline.traces import rows, segments
from pipeline.traces.chunks import TraceFile, write_file
from pipeline.traces.codec import canonical
from pipeline.traces.header import commit_header
from pipeline.traces.records import Geometry, Provenance, Routes, Sample, TraceError
from pipeline.traces.schema import SAMPLES, routes_schema


def write_shard(
    store: Store,
    step: int,
    shard: int,
    attempt: str,
    samples: Sequence[Sample],
    geometry: Geometry | None,
    provenance: Provenance | None,
    maker: Mapping[str, Any] | None = None,
) -> Committed:
    """Write the samples of a rollout shard, with their routes, and commit them.

    Without geometry the samples have no routes and none are written. `attempt` is a new one
    (`new_attempt`) for every call. `maker` goes into the commit as it is: who generated the shard
    and how long it took, {"worker": 0, "generation_s": 1.3}. When another maker of the shard was
    first, `ours` is False and this call's files are debris.
    Raises TraceError, naming the sample, for what no reader would accept; StoreError.
    """
    key = keys.rollout(step, shard)
    if (geometry is None) != (provenance is None):
        raise TraceError(f"{key}: geometry and provenance go together, only one was given")
    _check(key, samples)
    if geometry is None:
        files = []
        sample_rows = [rows.sample_row(_without_routes(s), None, None, None) for s in samples]
    else:
        routes = {s.id: _canonical(s.id, s.routes, geometry, len(s.tokens_S) - 1) for s in samples}
        cut = segments.cut(samples, routes)
        name = keys.rollout_file(step, shard, attempt, "routes")
        files = [_write_routes(store, name, cut.segments, geometry, provenance)]
        sample_rows = [
            rows.sample_row(s, geometry, routes[s.id], cut.rows_of[s.id]) for s in samples
        ]
    name = keys.rollout_file(step, shard, attempt, "samples")
    files.append(write_file(store, name, "samples", rows.tables(sample_rows), SAMPLES))
    body = {"step": step, "shard": shard, "samples": len(samples), "maker": dict(maker or {})}
    return commit_header(store, key, body, geometry, provenance, files, attempt)


def write_training_routes(
    store: Store,
    step: int,
    stage: int,
    dp_rank: int,
    attempt: str,
    routes: Mapping[str, Routes],
    geometry: Geometry,
    provenance: Provenance,
) -> Committed:
    """Write the routes of a pipeline stage's layers and a data-parallel rank's samples (R2).

    `geometry` has this stage's layers only; `routes` are by sample id. `attempt`, `ours` and
    errors as in `write_shard`.
    """
    whole = [
        segments.Segment(id, 0, _canonical(id, of_sample, geometry, len(of_sample.valid_T)))
        for id, of_sample in routes.items()
    ]
    name = keys.training_file(step, stage, dp_rank, attempt)
    file = _write_routes(store, name, whole, geometry, provenance)
    body = {"step": step, "stage": stage, "dp_rank": dp_rank, "samples": len(routes)}
    key = keys.training(step, stage, dp_rank)
    return commit_header(store, key, body, geometry, provenance, [file], attempt)


def write_samples(store: Store, key: str, samples: Sequence[Sample]) -> DataFile:
    """Write samples without their routes as one file, for the caller to commit (validation).

    Raises TraceError, naming the sample; StoreError.
    """
    _check(key, samples)
    sample_rows = [rows.sample_row(sample, None, None, None) for sample in samples]
    return write_file(store, key, "samples", rows.tables(sample_rows), SAMPLES).data


def _write_routes(
    store: Store,
    key: str,
    whole: Sequence[segments.Segment],
    geometry: Geometry,
    provenance: Provenance | None,
) -> TraceFile:
    tables = segments.tables(whole, geometry)
    return write_file(store, key, "routes", tables, routes_schema(geometry), geometry, provenance)


def _canonical(id: str, routes: Routes | None, geometry: Geometry, rows_: int) -> Routes:
    if routes is None:
        raise TraceError(
            f"sample {id}: no routes; a row that is not known is one that is not valid"
        )
    try:
        return canonical(routes, geometry, rows_)
    except TraceError as error:
        raise TraceError(f"sample {id}: {error}") from error


def _without_routes(sample: Sample) -> Sample:
    if sample.routes is not None:
        raise TraceError(f"sample {sample.id}: it has routes, but its shard has no geometry")
    return sample


def _check(key: str, samples: Sequence[Sample]) -> None:
    for sample in samples:
        rows.check(sample)
    ids = [sample.id for sample in samples]
    if len(set(ids)) != len(ids):
        double = next(id for i, id in enumerate(ids) if id in ids[:i])
        raise TraceError(f"{key}: sample {double} is there twice")
