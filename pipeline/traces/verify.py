"""A full offline check: of each step every byte, every row, every join; of a run all its files.

What it finds is a list, not an exception: one bad object does not hide the next.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pipeline.store import Store, keys
from pipeline.store.commit import CorruptObjectError, read_data, sha256
from pipeline.traces.chunks import TraceFile
from pipeline.traces.header import Header, read_header
from pipeline.traces.ids import check_ids, expected_ids
from pipeline.traces.manifest import Manifest, open_file, read_manifest
from pipeline.traces.problems import Report
from pipeline.traces.prune import is_pruned
from pipeline.traces.reader import read_samples, read_slices
from pipeline.traces.records import Geometry, TraceError
from pipeline.traces.schema import parse_geometry
from pipeline.traces.training import digested, joined, read_training
from pipeline.traces.verify_run import (
    find_signed,
    verify_attempts,
    verify_checkpoints,
    verify_inputs,
    verify_policies,
    verify_validations,
)

_SAMPLES_AT_ONCE = 256


def verify(store: Store, step: int | None = None) -> Report:
    """Check a run or record set: all of it, or one step only."""
    report = Report(store.uri)
    run, geometry = None, None
    with report.noting(keys.run_json()):
        run = find_signed(store, keys.run_json())
        geometry = parse_geometry((run or {}).get("geometry"), keys.run_json())
    if step is not None:
        _verify_step(store, step, geometry, report)
        return report
    for number in _steps(store):
        _verify_step(store, number, geometry, report)
    if not any(problem.key == keys.run_json() for problem in report.problems):
        verify_inputs(store, run, report)
    verify_attempts(store, report)
    verify_policies(store, report)
    verify_checkpoints(store, report)
    verify_validations(store, report)
    return report


def _steps(store: Store) -> list[int]:
    """The steps that have a plan, a manifest or metrics, ascending."""
    found = set()
    for info in store.list(keys.steps()):
        step = keys.number_of(info.key)
        if step is not None and info.key in (
            keys.plan(step),
            keys.manifest(step),
            keys.metrics(step),
        ):
            found.add(step)
    return sorted(found)


def _verify_step(store: Store, step: int, geometry: Geometry | None, report: Report) -> None:
    """What there is of a step; a step in the making has no manifest yet."""
    before = len(report.problems)
    pruned = is_pruned(store, step)
    samples = _verify_objects(store, step, geometry, report, pruned)
    if not pruned and len(report.problems) > before and is_pruned(store, step):
        pruned = True  # while it was read: what is missing now is meant to be
        del report.problems[before:]
        samples = _verify_objects(store, step, geometry, report, pruned)
    if samples is not None:
        report.steps += 1
        report.samples += samples
        report.pruned += pruned


def _verify_objects(
    store: Store, step: int, geometry: Geometry | None, report: Report, pruned: bool
) -> int | None:
    """The number of samples, 0 if it is not known; None: the step is not sealed."""
    plan = _body(store, step, keys.plan(step), report)
    _body(store, step, keys.metrics(step), report)
    key = keys.manifest(step)
    if store.size(key) is None:
        if store.size(keys.metrics(step)) is not None:
            report.add(key, f"no such object, but the step was trained: {keys.metrics(step)}")
        return None
    manifest = _verify_manifest(store, step, report)
    if manifest is None:
        return 0
    with report.noting(key):
        _verify_rows(manifest, geometry)
    if plan is not None:
        _verify_plan(step, manifest, plan, report)
    bad = set()
    for number, ref in enumerate(manifest.files):
        before = len(report.problems)
        file = None
        with report.noting(ref.commit):
            file, _ = open_file(store, manifest, number)
        if file is not None and not pruned:
            _verify_file(store, file, report)
        if file is None or len(report.problems) > before:
            bad.add(number)
    if pruned:
        _body(store, step, keys.pruned(step), report)
    else:
        _verify_samples(store, manifest, bad, report)
    _verify_training(store, manifest, geometry, report, pruned)
    return len(manifest.ids)


def _body(store: Store, step: int, key: str, report: Report) -> Mapping[str, Any] | None:
    """A step's plan or metrics; None when it is not there, or is not a good one."""
    with report.noting(key):
        body = find_signed(store, key)
        if body is None or body.get("step") == step:
            return body
        raise CorruptObjectError(f"{key}: of step {body.get('step')!r}, expected {step}")
    return None


def _verify_manifest(store: Store, step: int, report: Report) -> Manifest | None:
    """The manifest and the file of its rows; None when either is bad."""
    key = keys.manifest(step)
    before = len(report.problems)
    with report.noting(key):
        for file in read_header(store, key).files:
            _verify_file(store, file, report)
    if len(report.problems) == before:
        with report.noting(key):
            return read_manifest(store, step)
    return None


def _verify_plan(step: int, manifest: Manifest, plan: Mapping[str, Any], report: Report) -> None:
    """The manifest has the samples that the plan asked for."""
    ids = version = None
    with report.parsing(keys.plan(step)):
        ids, version = expected_ids(plan), plan["policy_version"]
    if ids is None:
        return
    with report.noting(keys.manifest(step)):
        check_ids(keys.manifest(step), manifest.ids, ids)
        if manifest.policy_versions != (version,):
            raise TraceError(
                f"policy versions {manifest.policy_versions}, {keys.plan(step)} says {version}"
            )


def _verify_file(store: Store, file: TraceFile, report: Report) -> None:
    """Compare a whole file and each of its ranges with their digests."""
    report.seen[file.data.key] = file.data
    data = memoryview(b"")
    with report.noting(file.data.key):
        data = memoryview(read_data(store, file.data))
    for range_ in file.ranges if data else ():
        if sha256(data[range_.offset : range_.offset + range_.length]) != range_.sha256:
            at = f"bytes {range_.offset}..{range_.offset + range_.length}"
            text = f"{at}: the commit has another digest of them than of the whole file"
            report.add(file.data.key, text)


def _verify_rows(manifest: Manifest, geometry: Geometry | None) -> None:
    """The manifest's columns among themselves, and with the run's model."""
    if manifest.geometry is not None and geometry not in (None, manifest.geometry):
        raise TraceError(f"made for {manifest.geometry}, the run's model has {geometry}")
    columns = ("id", "prompt_length", "response_length", "rows_total", "rows_valid", "routes")
    for row in manifest.rows.select(columns).to_pylist():
        if row["rows_total"] != row["prompt_length"] + row["response_length"] - 1:
            raise TraceError(
                f"sample {row['id']}: {row['rows_total']} rows for {row['prompt_length']} prompt "
                f"and {row['response_length']} response tokens"
            )
        if (manifest.geometry is None) != (row["routes"] is None):
            raise TraceError(f"sample {row['id']}: it has no routes, other samples have")


def _verify_samples(store: Store, manifest: Manifest, bad: set[int], report: Report) -> None:
    """Every sample's tokens and routes, file by file; files known to be bad are passed over."""
    columns = manifest.rows.select(["id", "samples", "routes"]).to_pylist()
    by_files: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for row in columns:
        routes = tuple(part["file"] for part in row["routes"] or ())
        by_files.setdefault((row["samples"]["file"], routes), []).append(row["id"])
    for (samples_file, routes_files), ids in by_files.items():
        for some in _batches(ids):
            if samples_file not in bad:
                name = manifest.files[samples_file].key
                _each(report, name, some, lambda ids: read_samples(store, manifest, ids))
            if manifest.geometry is not None and not bad.intersection(routes_files):
                _verify_routes(store, manifest, manifest.files[routes_files[0]].key, some, report)


def _verify_routes(
    store: Store, manifest: Manifest, name: str, ids: Sequence[str], report: Report
) -> None:
    with report.noting(name):
        slices = read_slices(store, manifest, ids)
        for id in ids:
            with report.noting(name, id):
                slices.routes(id)


def _verify_training(
    store: Store, manifest: Manifest, geometry: Geometry | None, report: Report, pruned: bool
) -> None:
    """The trainer's own routes: each file, then their join with the manifest."""
    prefix = keys.trainings(manifest.step)
    headers: list[Header] = []
    before = len(report.problems)
    for key in [info.key for info in store.list(prefix) if info.key.endswith(".json")]:
        with report.noting(key):
            header = read_training(store, manifest.step, key)
            headers.append(header)
            for file in () if pruned else header.files:
                _verify_file(store, file, report)
    if pruned or not headers or len(report.problems) > before:
        return
    with report.noting(prefix):
        made = digested(store, joined(store, manifest, headers))
        if geometry not in (None, made.geometry):
            raise TraceError(f"{prefix}: routes of {made.geometry}, the model has {geometry}")


def _each(
    report: Report, name: str, ids: Sequence[str], read: Callable[[Sequence[str]], Any]
) -> None:
    """Read all at once; when that fails, one by one, to name each bad sample."""
    probe = Report(report.uri)
    with probe.noting(name):
        read(ids)
    for id in ids if probe.problems else ():
        with report.noting(name, id):
            read([id])


def _batches(ids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (ids[i : i + _SAMPLES_AT_ONCE] for i in range(0, len(ids), _SAMPLES_AT_ONCE))
