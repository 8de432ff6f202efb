"""`retrace logs`: show the output of a run's workers."""

import time
from pathlib import Path
from typing import Annotated

import typer

import retrace
from pipeline.cli.check import Overrides
from pipeline.cli.printable import printable_line
from pipeline.cli.runs import Run, place_of, refusing
from pipeline.report.folders import NoLogsError
from pipeline.upkeep.run_list import NoRunError

_POLL_S = 0.3
_START_POLL_S = 1.0


def logs(
    run: Run,
    overrides: Overrides = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            metavar="NAME",
            help="Show only this worker, such as rollout-0 (repeat the option for more).",
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Print new lines as they are written, until Ctrl-C."),
    ] = False,
    lines: Annotated[
        int,
        typer.Option("--lines", "-n", min=0, metavar="N", help="Show each log's last N lines."),
    ] = 50,
) -> None:
    """Show the logs of a run's workers on this machine.

    A log contains the output of its worker from every start, in order. With -f, this command also
    waits for workers that have not started yet.
    """
    try:
        with refusing():
            shown = _await_logs(run, overrides or [], worker or [], follow)
        ends = {name: _show_end(name, file, lines, len(shown) > 1) for name, file in shown.items()}
        if follow:
            _follow(next(iter(shown.values())).parent, worker or [], ends)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _await_logs(
    run: str, overrides: list[str], workers: list[str], follow: bool
) -> dict[str, Path]:
    """Return the logs of the chosen workers; if `follow`, wait until the workers start."""
    waits = False
    while True:
        try:
            return _logs_of(run, overrides, workers)
        except (NoRunError, NoLogsError) as error:
            if not follow:
                raise
            if not waits:
                typer.echo(f"waiting for logs (Ctrl-C ends this): {error}", err=True)
            waits = True
        time.sleep(_START_POLL_S)


def _logs_of(run: str, overrides: list[str], workers: list[str]) -> dict[str, Path]:
    """Return the log of each chosen worker, by name. Raises NoLogsError if a worker has none."""
    # The folder of a run's name exists only once the run has started.
    files = {file.stem: file for file in retrace.log_files(place_of(run), overrides)}
    if unknown := set(workers) - set(files):
        raise NoLogsError(
            [f"--worker {sorted(unknown)[0]}: no such worker; found {', '.join(files)}"]
        )
    return {name: file for name, file in files.items() if not workers or name in workers}


def _show_end(name: str, file: Path, lines: int, header: bool) -> int:
    """Print the last lines of a log, and return the log's size in bytes."""
    content = file.read_bytes()
    if header:
        typer.echo(f"==> {name} <==")
    last = content.decode(errors="replace").splitlines()[-lines:] if lines else []
    for line in last:
        typer.echo(printable_line(line))
    return len(content)


def _follow(folder: Path, workers: list[str], ends: dict[str, int]) -> None:
    """Print new lines. If there are several logs, each line begins with its worker's name."""
    begun: dict[str, bytes] = {}  # the beginnings of unfinished lines
    while True:
        there = {file.stem: file for file in sorted(folder.glob("*.log"))}  # some may be new
        files = {name: file for name, file in there.items() if not workers or name in workers}
        for name, file in files.items():
            end = ends.get(name, 0)
            size = file.stat().st_size if file.is_file() else 0
            if size < end:  # the file was replaced
                end, begun[name] = 0, b""
            if size == end:
                continue
            with file.open("rb") as source:
                source.seek(end)
                added = source.read(size - end)
            ends[name] = end + len(added)
            *whole, begun[name] = (begun.get(name, b"") + added).split(b"\n")
            for line in whole:
                prefix = f"{name} | " if len(files) > 1 else ""
                typer.echo(prefix + printable_line(line.decode(errors="replace")))
        time.sleep(_POLL_S)
