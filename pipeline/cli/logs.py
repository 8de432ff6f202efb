"""`retrace logs`: show the output of a run's workers."""

import time
from pathlib import Path
from typing import Annotated

import typer

import retrace
from pipeline.cli.printable import printable_line
from pipeline.cli.runs import Run, refusing

_POLL_S = 0.3


def logs(
    run: Run,
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

    A log contains the output of its worker from every start, in order.
    """
    with refusing():
        files = {file.stem: file for file in retrace.log_files(run)}
        if unknown := set(worker or ()) - set(files):
            raise retrace.InputError(
                [f"--worker {sorted(unknown)[0]}: no such worker; found {', '.join(files)}"]
            )
    shown = {name: file for name, file in files.items() if not worker or name in worker}
    ends = {name: _show_end(name, file, lines, len(shown) > 1) for name, file in shown.items()}
    if follow:
        try:
            _follow(shown, ends)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _show_end(name: str, file: Path, lines: int, header: bool) -> int:
    """Print the last lines of a log, and return the log's size in bytes."""
    content = file.read_bytes()
    if header:
        typer.echo(f"==> {name} <==")
    last = content.decode(errors="replace").splitlines()[-lines:] if lines else []
    for line in last:
        typer.echo(printable_line(line))
    return len(content)


def _follow(files: dict[str, Path], ends: dict[str, int]) -> None:
    """Print new lines. If there are several logs, each line begins with its worker's name."""
    begun = dict.fromkeys(files, b"")  # the beginnings of unfinished lines
    while True:
        for name, file in files.items():
            size = file.stat().st_size if file.is_file() else 0
            if size < ends[name]:  # the file was replaced
                ends[name], begun[name] = 0, b""
            if size == ends[name]:
                continue
            with file.open("rb") as source:
                source.seek(ends[name])
                added = source.read(size - ends[name])
            ends[name] += len(added)
            *whole, begun[name] = (begun[name] + added).split(b"\n")
            for line in whole:
                prefix = f"{name} | " if len(files) > 1 else ""
                typer.echo(prefix + printable_line(line.decode(errors="replace")))
        time.sleep(_POLL_S)
