"""`retrace logs`: what a run's workers print."""

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
            help="This one only, such as rollout-0 or training-0 (repeat for more).",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as lines come, until Ctrl-C.")
    ] = False,
    lines: Annotated[
        int,
        typer.Option("--lines", "-n", min=0, metavar="N", help="The last lines of each worker."),
    ] = 50,
) -> None:
    """Show the logs of a run's workers on this machine.

    A log holds all starts of its worker, one after the other.
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
    """Print the last lines of a log; return how many bytes it had."""
    content = file.read_bytes()
    if header:
        typer.echo(f"==> {name} <==")
    last = content.decode(errors="replace").splitlines()[-lines:] if lines else []
    for line in last:
        typer.echo(printable_line(line))
    return len(content)


def _follow(files: dict[str, Path], ends: dict[str, int]) -> None:
    """Print what is added, each line with its worker's name if there are several."""
    begun = dict.fromkeys(files, b"")  # a line whose end has not come yet
    while True:
        for name, file in files.items():
            size = file.stat().st_size if file.is_file() else 0
            if size < ends[name]:  # removed, and begun anew
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
