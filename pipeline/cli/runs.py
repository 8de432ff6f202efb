"""What the commands that look at a run have in common: opening it, refusing, printing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import retrace
from pipeline.store.schemes import DEFAULT_STORE


def place_of(run: str) -> str:
    """The folder or URI that RUN names: itself, or of a run's name its folder in outputs/store."""
    folder = Path(DEFAULT_STORE, run)
    is_name = run not in ("", ".", "..") and not set(run) & set("/:")
    return str(folder) if is_name and not Path(run).exists() and folder.is_dir() else run


def names_like(begin: str) -> list[str]:
    """Completion: the names of runs in outputs/store that begin so."""
    return [
        folder.parent.name
        for folder in sorted(Path(DEFAULT_STORE).glob("*/run.json"))
        if folder.parent.name.startswith(begin)
    ]


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help=f"Folder or URI of a run or a recorded set, or the name of a run in {DEFAULT_STORE}.",
        callback=place_of,
        autocompletion=names_like,
    ),
]

_INPUT = 2  # exit code: what was asked for is not there


@contextmanager
def refusing() -> Iterator[None]:
    """Turn what a store or trace lacks into one line and exit code 2."""
    try:
        yield
    except (retrace.InputError, retrace.StoreError, retrace.TraceError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(_INPUT) from error


def open_run(run: str, sealed: bool = True) -> retrace.Run:
    """The run or recorded set; `sealed`: with a step to look at."""
    opened = retrace.open_run(run)
    if sealed and not opened.steps():
        raise retrace.TraceError(f"{run}: no step of this run is sealed yet")
    return opened


def print_(what: Any) -> None:
    """Print a text as it is, or a table."""
    # Cut to the terminal a table would hide experts; a pipe has no width to keep to.
    console = Console()
    if not console.is_terminal:
        console = Console(width=1_000)
    console.print(what, markup=False, highlight=False, soft_wrap=isinstance(what, str))


def age(seconds: float) -> str:
    """In its largest whole unit: '3 d', '5 h', '12 s'."""
    units = {"d": 86_400, "h": 3_600, "m": 60}
    unit = next((unit for unit, size in units.items() if seconds >= size), "s")
    return f"{max(0.0, seconds) // units.get(unit, 1):.0f} {unit}"
