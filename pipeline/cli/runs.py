"""What the commands that look at a run have in common: opening it, refusing, printing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

import retrace
from pipeline.cli.printable import printable
from pipeline.run.commit import CorruptObjectError
from pipeline.store import ObjectMissingError, UnreadableError
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
DAMAGED = 1  # exit code: some of what was asked for cannot be read
_DAMAGE = (retrace.TraceError, CorruptObjectError, ObjectMissingError, UnreadableError)
"""What is wrong with one object; other errors are of the whole store."""


@contextmanager
def refusing() -> Iterator[None]:
    """Turn what a store or trace lacks into one line and exit code 2."""
    try:
        yield
    except (retrace.InputError, retrace.StoreError, retrace.TraceError, OSError) as error:
        _print_error(f"error: {error}")
        raise typer.Exit(_INPUT) from error


def for_steps(steps: Sequence[int], work: Callable[[int], None]) -> bool:
    """Do something with each of some steps; say whether any could not be read.

    Such a step is a line of its own, and hides no other.
    """
    damaged = False
    for step in steps:
        try:
            work(step)
        except _DAMAGE as error:
            _print_error(f"error: step {step}: {error}")
            damaged = True
    return damaged


def _print_error(text: str) -> None:
    shown = printable(text, keep="\n")
    Console(stderr=True).print(shown, style="red", markup=False, emoji=False, soft_wrap=True)


def open_run(run: str, sealed: bool = True) -> retrace.Run:
    """The run or recorded set; `sealed`: with a step to look at."""
    opened = retrace.open_run(run)
    if sealed and not opened.steps():
        raise retrace.TraceError(f"{run}: no step of this run is sealed yet")
    return opened


def print_(what: Any) -> None:
    """Print a text as one line, or a table."""
    # A pipe has no width to keep to.
    console = Console()
    if not console.is_terminal:
        console = Console(width=1_000)
    is_text = isinstance(what, str)
    shown = printable(what) if is_text else what
    console.print(shown, markup=False, emoji=False, highlight=False, soft_wrap=is_text)


def print_line(text: str) -> None:
    """Print a text as one line, on a terminal as much of it as its width holds."""
    console = Console()
    line = printable(text)
    if console.is_terminal:
        console.print(
            line, markup=False, emoji=False, highlight=False, no_wrap=True, overflow="ellipsis"
        )
    else:
        print_(line)


Wide = Annotated[
    bool, typer.Option("--wide", help="All columns, also those that do not fit the terminal.")
]


def print_table(table: Table, wide: bool, optional: Sequence[str]) -> None:
    """Print a table. On a terminal, unless `wide`, columns that do not fit are left out and named.

    `optional` are the headers of those that may be left out, the first of them first.
    """
    console = Console()
    if wide or not console.is_terminal:
        Console(width=10_000).print(table, highlight=False)
        return
    unlimited = console.options.update(width=10_000)
    left_out: list[str] = []
    there = {str(column.header) for column in table.columns}
    for header in (header for header in optional if header in there):
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
        table.columns = [column for column in table.columns if column.header != header]
        left_out.insert(0, header)
    console.print(table, highlight=False)
    if left_out:
        names = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        print_(f"left out, as it does not fit: {names}; --wide shows all ({len(left_out)} more)")


def age(seconds: float) -> str:
    """In its largest whole unit: '3 d', '5 h', '12 s'."""
    units = {"d": 86_400, "h": 3_600, "m": 60}
    unit = next((unit for unit, size in units.items() if seconds >= size), "s")
    return f"{max(0.0, seconds) // units.get(unit, 1):.0f} {unit}"
