"""A full offline check of sealed steps: every byte, every row, every join.

What it finds is a list, not an exception: one bad object does not hide the next.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pipeline.store import Store, StoreError, keys
from pipeline.store.commit import find_commit, read_data, sha256
from pipeline.traces.chunks import TraceFile
from pipeline.traces.header import Header, read_header
from pipeline.traces.ids import expected_ids
from pipeline.traces.manifest import Manifest, check_ids, open_file, read_manifest, sealed_steps
from pipeline.traces.reader import read_samples, read_slices
from pipeline.traces.records import Geometry, TraceError
from pipeline.traces.schema import parse_geometry
from pipeline.traces.training import digested, joined, read_training

_SAMPLES_AT_ONCE = 256


@dataclass(frozen=True)
class Problem:
    """Something wrong. Example: Problem('steps/000000/manifest.json', None, 'not JSON: ...')."""

    key: str
    """Of the object."""
    sample: str | None
    text: str


@dataclass
class Report:
    """What a check has seen."""

    steps: int = 0
    samples: int = 0
    files: int = 0
    size: int = 0
    """Bytes of the files."""
    problems: list[Problem] = field(default_factory=list)

    @contextmanager
    def noting(self, key: str, sample: str | None = None) -> Iterator[None]:
        """Take an error of the block down as a problem of this object."""
        try:
            yield
        except (TraceError, StoreError) as error:
            self.problems.append(Problem(key, sample, str(error)))


def verify(store: Store, steps: Sequence[int] | None = None) -> Report:
    """Check sealed steps of a run or record set; all of them by default."""
    report = Report()
    geometry = None
    with report.noting(keys.run_json()):
        run = find_commit(store, keys.run_json())
        geometry = parse_geometry((run or {}).get("geometry"), keys.run_json())
    for step in sealed_steps(store) if steps is None else steps:
        _verify_step(store, step, geometry, report)
    if steps is None:
        _unsealed(store, report)
    return report


def _verify_step(store: Store, step: int, geometry: Geometry | None, report: Report) -> None:
    report.steps += 1
    key = keys.manifest(step)
    manifest = None
    with report.noting(key):
        manifest = read_manifest(store, step)
    if manifest is None:
        return
    report.samples += len(manifest.ids)
    _verify_file(store, read_header(store, key).files[0], report)
    with report.noting(key):
        _verify_rows(manifest, geometry)
    with report.noting(key):
        plan = find_commit(store, keys.plan(step))
        if plan is not None:
            check_ids(key, manifest.ids, expected_ids(plan))
            if manifest.policy_versions != (plan["policy_version"],):
                raise TraceError(
                    f"policy versions {manifest.policy_versions}, the plan says "
                    f"{plan['policy_version']}"
                )
    bad = set()
    for number, ref in enumerate(manifest.files):
        before = len(report.problems)
        with report.noting(ref.key):
            _verify_file(store, open_file(store, manifest, number)[0], report)
        if len(report.problems) > before:
            bad.add(number)
    _verify_samples(store, manifest, bad, report)
    _verify_training(store, manifest, geometry, report)


def _verify_file(store: Store, file: TraceFile, report: Report) -> None:
    """Compare a whole file and each of its ranges with their digests."""
    report.files += 1
    report.size += file.data.size
    data = memoryview(b"")
    with report.noting(file.data.key):
        data = memoryview(read_data(store, file.data))
    for range_ in file.ranges if data else ():
        if sha256(data[range_.offset : range_.offset + range_.length]) != range_.sha256:
            at = f"bytes {range_.offset}..{range_.offset + range_.length}"
            text = f"{at}: the commit has another digest of them than of the whole file"
            report.problems.append(Problem(file.data.key, None, text))


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
    store: Store, manifest: Manifest, geometry: Geometry | None, report: Report
) -> None:
    """The trainer's own routes: each file, then their join with the manifest."""
    prefix = keys.trainings(manifest.step)
    headers: list[Header] = []
    before = len(report.problems)
    for key in [info.key for info in store.list(prefix) if info.key.endswith(".json")]:
        with report.noting(key):
            header = read_training(store, manifest.step, key)
            headers.append(header)
            for file in header.files:
                _verify_file(store, file, report)
    if not headers or len(report.problems) > before:
        return
    with report.noting(prefix):
        made = digested(store, joined(store, manifest, headers))
        if geometry not in (None, made.geometry):
            raise TraceError(f"{prefix}: routes of {made.geometry}, the model has {geometry}")


def _unsealed(store: Store, report: Report) -> None:
    """Steps that were trained, so must have been sealed."""
    sealed = set(sealed_steps(store))
    for info in store.list(keys.steps()):
        step = keys.number_of(info.key)
        if step is not None and info.key == keys.metrics(step) and step not in sealed:
            text = f"the step was trained, but {keys.manifest(step)} does not exist"
            report.problems.append(Problem(info.key, None, text))


def _each(
    report: Report, name: str, ids: Sequence[str], read: Callable[[Sequence[str]], Any]
) -> None:
    """Read all at once; when that fails, one by one, to name each bad sample."""
    probe = Report()
    with probe.noting(name):
        read(ids)
    for id in ids if probe.problems else ():
        with report.noting(name, id):
            read([id])


def _batches(ids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (ids[i : i + _SAMPLES_AT_ONCE] for i in range(0, len(ids), _SAMPLES_AT_ONCE))
