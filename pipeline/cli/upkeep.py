"""`retrace traces sweep` and `retrace traces prune`: remove debris and old steps."""

import re
from typing import Annotated

import typer

from pipeline.cli.printable import printable_message
from pipeline.cli.runs import Run, age, open_run, print_, refusing
from pipeline.traces import TraceError
from pipeline.upkeep.problems import Report
from pipeline.upkeep.prune import prune
from pipeline.upkeep.sweep import sweep

_DryRun = Annotated[bool, typer.Option("--dry-run", help="List the removals, but remove nothing.")]

_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def sweep_(
    run: Run,
    older_than: Annotated[
        str,
        typer.Option(
            metavar="AGE",
            help="Keep files younger than this: a number and s, m, h or d. AGE must exceed the "
            "time that a worker takes for a shard or a checkpoint.",
        ),
    ] = "24h",
    dry_run: _DryRun = False,
) -> None:
    """Remove the debris of killed workers: files that no commit names, and unfinished uploads.

    The run may continue during the sweep. Files that a damaged commit may name are kept.
    """
    with refusing():
        limit_s = _seconds(older_than)
        store = open_run(run, sealed=False).store
        report = Report(store.uri)
        objects = size = 0
        for debris in sweep(store, limit_s, report, dry_run):
            print_(f"{debris.key}: {debris.size:,} bytes, {age(debris.age_s)} old, {debris.what}")
            objects += 1
            size += debris.size
    for problem in report.problems:
        print_(printable_message(str(problem)))
    print_(f"{_verb(dry_run)} {objects:,} objects, {size:,} bytes")
    if report.problems:
        raise typer.Exit(1)


def prune_(
    run: Run,
    keep_steps: Annotated[
        int,
        typer.Option(
            "--keep-steps", min=0, metavar="N", help="Keep all data of the last N sealed steps."
        ),
    ],
    dry_run: _DryRun = False,
) -> None:
    """Remove the samples and routes of all sealed steps except the last N.

    Manifests (ids, lengths, rewards, digests), plans and metrics stay. If a restart of the run
    needs any of the data, nothing is removed.
    """
    with refusing():
        steps = files = size = 0
        for pruned in prune(open_run(run).store, keep_steps, dry_run):
            print_(f"step {pruned.step}: {pruned.files:,} files, {pruned.size:,} bytes")
            steps += 1
            files += pruned.files
            size += pruned.size
    print_(
        f"{_verb(dry_run)} samples and routes of {steps:,} steps: {files:,} files, {size:,} bytes"
    )


def _seconds(age: str) -> float:
    match = _AGE.fullmatch(age)
    if match is None:
        raise TraceError(f"--older-than {age!r}: expected a number and s, m, h or d, such as 24h")
    return float(match[1]) * _SECONDS[match[2]]


def _verb(dry_run: bool) -> str:
    return "would remove" if dry_run else "removed"
