"""The part of `verify` for one step: its commits and their files, its manifest, its samples."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow.compute as pc

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from pipeline.run.plan import Plan
from pipeline.store import Store
from pipeline.traces.format.header import Header, read_header
from pipeline.traces.format.ids import check_ids, expected_ids
from pipeline.traces.format.manifest import Manifest, open_file, read_manifest
from pipeline.traces.format.pruned import is_pruned
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.reader import read_samples, read_slices
from pipeline.traces.read.training import digested, joined, read_training
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.contents import verify_file
from pipeline.upkeep.verify.stored_run import find_signed, find_signed_plan

_SAMPLES_AT_ONCE = 256
_SHARD = re.compile(r"/rollout/\d{5}\.json$")


def verify_step(store: Store, step: int, geometry: Geometry | None, report: Report) -> None:
    """Check what exists of a step; an unfinished step has no manifest yet.

    `geometry` is the run's, None if it is unknown.
    """
    before = len(report.problems)
    pruned = is_pruned(store, step)
    samples = _verify_objects(store, step, geometry, report, pruned)
    if not pruned and len(report.problems) > before and is_pruned(store, step):
        pruned = True  # pruned while it was read: files are missing as they should be
        del report.problems[before:]
        samples = _verify_objects(store, step, geometry, report, pruned)
    if samples is not None:
        report.steps += 1
        report.samples += samples
        report.pruned += pruned


def _verify_objects(
    store: Store, step: int, geometry: Geometry | None, report: Report, pruned: bool
) -> int | None:
    """Check a step's objects; return its number of samples, 0 if unknown, None if not sealed."""
    plan = None
    with report.noting(keys.plan(step)):
        plan = find_signed_plan(store, keys.plan(step))
    _verify_body(store, step, keys.metrics(step), "metrics", report)
    _verify_body(store, step, keys.pruned(step), "data", report)
    key = keys.manifest(step)
    sealed = store.size(key) is not None
    training = _verify_commits(store, step, report, pruned, sealed)
    if not sealed:
        if store.size(keys.metrics(step)) is not None:
            report.add(key, f"no such object, but the step was trained: {keys.metrics(step)}")
        return None
    manifest = _verify_manifest(store, step, report)
    if manifest is None:
        return 0
    before = len(report.problems)
    with report.noting(key):
        _verify_rows(manifest, geometry)
    if plan is not None:
        _verify_plan(step, manifest, plan, report)
    if len(report.problems) == before:
        bad = _verify_files(store, manifest, report, pruned)
        if not pruned:
            _verify_samples(store, manifest, bad, report)
            _verify_training(store, manifest, training, geometry, report)
    return len(manifest.ids)


def _verify_body(store: Store, step: int, key: str, content: str, report: Report) -> None:
    """Check a step's metrics or pruned.json, which must hold `content`."""
    with report.noting(key):
        body = find_signed(store, key)
        if body is not None and not (body.get("step") == step and content in body):
            raise CorruptObjectError(
                f"{key}: of step {body.get('step')!r} with {', '.join(body)}, expected {content} "
                f"of step {step}"
            )


def _verify_commits(
    store: Store, step: int, report: Report, pruned: bool, sealed: bool
) -> list[Header]:
    """Check shards and the trainer's routes with their files; return the trainer's commits.

    In a sealed step the manifest decides which files of a shard must exist: without replayed routes
    a recorded set holds only a shard's samples.
    """
    training = []
    infos = list(store.list(keys.step_prefix(step)))
    _verify_trained(step, {info.key for info in infos}, report)
    for info in infos:
        with report.noting(info.key):
            optional = False
            if info.key.startswith(keys.trainings(step)) and info.key.endswith(".json"):
                header = read_training(store, step, info.key)
                training.append(header)
            elif _SHARD.search(info.key):
                optional = sealed
                header = read_header(store, info.key)
                shard = header.body.get("shard")
                place = keys.rollout(step, shard) if isinstance(shard, int) else None
                # A copy from a recorded set has another key, and so have its files.
                if "/replay/" in info.key:
                    continue
                if header.body.get("step") != step or place != info.key:
                    raise TraceError(f"{info.key}: of step {header.body.get('step')}, {shard=}")
            else:
                continue
            for file in () if pruned else header.files:
                if not optional or store.size(file.data.key) is not None:
                    verify_file(store, file, report, info.key)
    return training


def _verify_trained(step: int, there: set[str], report: Report) -> None:
    """Check that the routes recorded in a trained step are committed."""
    for key in sorted(there) if keys.metrics(step) in there else ():
        made = keys.maker_of(key)
        if made is not None and key.startswith(keys.trainings(step)):
            commit = made.rpartition(".")[0] + ".json"
            if commit not in there:
                report.add(commit, f"no such object, but {key} is there")


def _verify_manifest(store: Store, step: int, report: Report) -> Manifest | None:
    """Check and read the manifest and the file of its rows; None when either is bad."""
    key = keys.manifest(step)
    before = len(report.problems)
    with report.noting(key):
        for file in read_header(store, key).files:
            verify_file(store, file, report, key)
    if len(report.problems) == before:
        with report.noting(key):
            return read_manifest(store, step)
    return None


def _verify_rows(manifest: Manifest, geometry: Geometry | None) -> None:
    """Compare the manifest's columns with each other, and its geometry with the run's model."""
    if manifest.geometry is not None and geometry not in (None, manifest.geometry):
        raise TraceError(f"made for {manifest.geometry}, the run's model has {geometry}")
    rows = manifest.rows
    tokens = pc.add(rows["prompt_length"], rows["response_length"])
    wrong = pc.not_equal(rows["rows_total"], pc.subtract(tokens, 1))
    for row in rows.filter(wrong).slice(0, 1).to_pylist():
        raise TraceError(
            f"sample {row['id']}: {row['rows_total']} rows for {row['prompt_length']} prompt "
            f"and {row['response_length']} response tokens"
        )
    without = pc.is_null(rows["routes"])
    if manifest.geometry is not None:
        without = pc.or_kleene(without, pc.equal(pc.list_value_length(rows["routes"]), 0))
    differs = without if manifest.geometry is not None else pc.invert(without)
    for row in rows.filter(differs).slice(0, 1).to_pylist():
        raise TraceError(f"sample {row['id']}: it has no routes, other samples have")


def _verify_plan(step: int, manifest: Manifest, plan: Plan, report: Report) -> None:
    """Check that the manifest has the samples of the plan."""
    version = plan.policy_version
    with report.noting(keys.manifest(step)):
        check_ids(keys.manifest(step), manifest.ids, expected_ids(plan))
        if manifest.policy_versions != (version,):
            raise TraceError(
                f"policy versions {manifest.policy_versions}, {keys.plan(step)} says {version}"
            )


def _verify_files(store: Store, manifest: Manifest, report: Report, pruned: bool) -> set[int]:
    """Compare the manifest's files with their commits; return the numbers of the bad ones."""
    for number, ref in enumerate(manifest.files):
        with report.noting(ref.commit):
            file, _ = open_file(store, manifest, number)
            if not pruned:
                verify_file(store, file, report, ref.commit)
    wrong = {problem.key for problem in report.problems}
    return {n for n, ref in enumerate(manifest.files) if wrong & {ref.key, ref.commit}}


def _verify_samples(store: Store, manifest: Manifest, bad: set[int], report: Report) -> None:
    """Check every sample's tokens and routes, file by file; known bad files are skipped."""
    key = keys.manifest(manifest.step)
    by_files: dict[tuple[int, ...], list[str]] = {}
    for row in manifest.rows.select(["id", "samples", "routes"]).to_pylist():
        numbers = (row["samples"]["file"], *(part["file"] for part in row["routes"] or ()))
        if all(number in range(len(manifest.files)) for number in numbers):
            by_files.setdefault(numbers, []).append(row["id"])
        else:
            report.add(key, f"files {numbers} of {len(manifest.files)}", row["id"])
    for (samples_file, *routes_files), ids in by_files.items():
        for some in _batches(ids):
            if samples_file not in bad:
                name = manifest.files[samples_file].key
                _each(report, name, some, lambda ids: read_samples(store, manifest, ids))
            if routes_files and not bad.intersection(routes_files):
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
    store: Store,
    manifest: Manifest,
    headers: Sequence[Header],
    geometry: Geometry | None,
    report: Report,
) -> None:
    """Join the trainer's own routes with the manifest, when all of them are good."""
    prefix = keys.trainings(manifest.step)
    if not headers or any(problem.key.startswith(prefix) for problem in report.problems):
        return
    with report.noting(prefix):
        made = digested(store, joined(store, manifest, headers))
        if geometry not in (None, made.geometry):
            raise TraceError(f"{prefix}: routes of {made.geometry}, the model has {geometry}")


def _each(
    report: Report, name: str, ids: Sequence[str], read: Callable[[Sequence[str]], Any]
) -> None:
    """Read all samples at once; when that fails, one by one, to name each bad one."""
    probe = Report(report.uri)
    with probe.noting(name):
        read(ids)
    for id in ids if probe.problems else ():
        with report.noting(name, id):
            read([id])


def _batches(ids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (ids[i : i + _SAMPLES_AT_ONCE] for i in range(0, len(ids), _SAMPLES_AT_ONCE))
