"""The part of `verify` that checks each rollout shard of a step separately, with its files."""

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
from pipeline.upkeep.verify.samples_pass import StagedPrompts, read_shard_rows


@dataclass(frozen=True)
class Shard:
    """A committed shard."""

    header: Header
    rows: pa.Table | None
    """The columns `samples_pass.ROWS` of the shard's samples; None if they are unreadable."""


def verify_shard(
    store: Store,
    header: Header,
    step: int,
    named: Mapping[str, str] | None,
    prompts: StagedPrompts | None,
    report: Report,
) -> Shard:
    """Check a shard's commit, its samples file, and its routes together with the samples.

    Args:
        store: The run or recorded set.
        header: The shard's commit.
        step: The step.
        named: The keys of the shard's files in the step's manifest, keyed by SHA-256. Only these
            files must exist. None if the step is not sealed; all files must then exist.
        prompts: The staged prompts of the step's run; None if they are unknown.
        report: Receives problems.

    Returns:
        The shard with its samples.
    """
    sealed, named = named is not None, named or {}
    check_shard_commit(header, step)
    rows = None
    files = {file.role: _placed(file, named) for file in header.files}
    if (file := files["samples"]).data.sha256 in named or not sealed or _there(store, file):
        rows = _rows(store, file, header, prompts, report)
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
    """Raise TraceError unless a shard's commit fits its key and names the required files."""
    shard = header.body.get("shard")
    place = keys.rollout(step, shard) if type(shard) is int else None
    if place is None or place != first_key(header.key):
        raise TraceError(
            f"{header.key}: step {header.body.get('step')}, {shard=}, expected the ones in its key"
        )
    roles = {"samples": 1} if header.geometry is None else {"samples": 1, "routes": 1}
    check_commit(header, {"step": step, "shard": shard}, roles)
    check_file_names(header)
    if not isinstance(header.body.get("maker"), dict):
        raise TraceError(f"{header.key}: maker {header.body.get('maker')!r}, expected an object")


def _rows(
    store: Store, file: TraceFile, header: Header, prompts: StagedPrompts | None, report: Report
) -> pa.Table | None:
    before = report.found
    verify_file(store, file, report, header.key)
    if report.found > before:
        return None
    with report.noting(file.data.key):
        check_footer(store, file, header)
        return read_shard_rows(store, file, header, prompts, report)
    return None


def _placed(file: TraceFile, named: Mapping[str, str]) -> TraceFile:
    """Return the file with the key under which the manifest lists it."""
    key = named.get(file.data.sha256, file.data.key)
    return replace(file, data=replace(file.data, key=key))


def _there(store: Store, file: TraceFile) -> bool:
    return store.size(file.data.key) is not None
