"""The part of `verify` for the rollout shards of a step: each with its files, by itself."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from pipeline.run import keys
from pipeline.store import Store
from pipeline.traces.format.chunks import TraceFile
from pipeline.traces.format.header import Header
from pipeline.traces.format.types import TraceError
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.commits import check_commit, check_file_names, first_key
from pipeline.upkeep.verify.contents import verify_file
from pipeline.upkeep.verify.footer import check_footer
from pipeline.upkeep.verify.routes_pass import RoutesPass
from pipeline.upkeep.verify.samples_pass import read_shard_rows


@dataclass(frozen=True)
class Shard:
    """A committed shard."""

    header: Header
    rows: pa.Table | None
    """Columns samples_pass.ROWS of its samples; None: they cannot be read."""


def verify_shard(
    store: Store, header: Header, step: int, named: Mapping[str, str], report: Report
) -> Shard:
    """Check a shard's commit, then its samples file, then its routes with the samples.

    `named` has the keys under which the step's manifest names the shard's files, by SHA-256: in a
    sealed step no others need exist. A step that is not sealed needs all.
    """
    sealed = store.size(keys.manifest(step)) is not None
    check_shard_commit(header, step)
    rows = None
    files = {file.role: _placed(file, named) for file in header.files}
    if (file := files["samples"]).data.sha256 in named or not sealed or _there(store, file):
        rows = _rows(store, file, header, report)
    routes = files.get("routes")
    if routes is None or not (routes.data.sha256 in named or not sealed or _there(store, routes)):
        return Shard(header, rows)
    with report.noting(routes.data.key):
        if rows is None or header.geometry is None:
            verify_file(store, routes, report, header.key)
        else:
            RoutesPass(store, routes, header.geometry, rows, report).run(header.key)
        if not any(problem.key == routes.data.key for problem in report.problems):
            check_footer(store, routes, header)
    return Shard(header, rows)


def check_shard_commit(header: Header, step: int) -> None:
    """Raise TraceError unless a shard's commit is where it belongs and names what it must."""
    shard = header.body.get("shard")
    place = keys.rollout(step, shard) if type(shard) is int else None
    if place is None or place != first_key(header.key):
        raise TraceError(f"{header.key}: of step {header.body.get('step')}, {shard=}")
    roles = {"samples": 1} if header.geometry is None else {"samples": 1, "routes": 1}
    check_commit(header, {"step": step, "shard": shard}, roles)
    check_file_names(header)
    if not isinstance(header.body.get("maker"), dict):
        raise TraceError(f"{header.key}: maker {header.body.get('maker')!r}, expected an object")


def _rows(store: Store, file: TraceFile, header: Header, report: Report) -> pa.Table | None:
    before = len(report.problems)
    verify_file(store, file, report, header.key)
    if len(report.problems) > before:
        return None
    with report.noting(file.data.key):
        check_footer(store, file, header)
        return read_shard_rows(store, file, header, report)
    return None


def _placed(file: TraceFile, named: Mapping[str, str]) -> TraceFile:
    """The file under the key where the manifest has it."""
    key = named.get(file.data.sha256, file.data.key)
    return replace(file, data=replace(file.data, key=key))


def _there(store: Store, file: TraceFile) -> bool:
    return store.size(file.data.key) is not None
