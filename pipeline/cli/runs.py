"""Helpers for commands that read a run: functions that open it, report errors and print."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

import retrace
from pipeline.cli.printable import printable, printable_message
from pipeline.run.commit import CorruptObjectError
from pipeline.store import ObjectMissingError, UnreadableError
from pipeline.store.schemes import DEFAULT_STORE


def place_of(run: str) -> str:
    """Return the folder or URI that RUN names; a run's name refers to a folder in outputs/store.

    Raises typer.BadParameter for an empty name.
    """
    if not run.strip():
        raise typer.BadParameter(
            f"found {run!r}, expected a folder, a URI or the name of a run; `retrace runs ls` "
            "lists the runs"
        )
    folder = os.path.join(DEFAULT_STORE, run)
    is_name = run not in ("", ".", "..") and not set(run) & set("/:")
    # Unlike Path's, these functions also accept names that no file can have.
    return folder if is_name and not os.path.exists(run) and os.path.isdir(folder) else run


def names_like(begin: str) -> list[str]:
    """Return the names of runs in outputs/store that start with `begin`, for completion."""
    return [
        folder.parent.name
        for folder in sorted(Path(DEFAULT_STORE).glob("*/run.json"))
        if folder.parent.name.startswith(begin)
    ]


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help=f"Folder or URI of a run or recorded set, or the name of a run in {DEFAULT_STORE}.",
        callback=place_of,
        autocompletion=names_like,
    ),
]

_INPUT = 2  # exit code: the run, step or sample does not exist
DAMAGED = 1  # exit code: some of the steps or objects cannot be read
_DAMAGE = (retrace.TraceError, CorruptObjectError, ObjectMissingError, UnreadableError)
"""Errors that affect only one object; all other errors affect the store itself."""


@contextmanager
def refusing() -> Iterator[None]:
    """Report an error in the input, a store or a trace as one line, and exit with code 2."""
    try:
        yield
    except (retrace.InputError, retrace.StoreError, retrace.TraceError, OSError) as error:
        _print_error(f"error: {error}")
        raise typer.Exit(_INPUT) from error


def for_steps(steps: Sequence[int], work: Callable[[int], None]) -> bool:
    """Call `work` for each step, and return whether any step could not be read.

    Each unreadable step is reported on its own line, and the other steps are still processed.
    """
    damaged = False
    for step in steps:
        try:
            work(step)
        except _DAMAGE as error:
            text = str(error)
            named = text.startswith((f"step {step} ", f"step {step}:"))
            _print_error(f"error: {text}" if named else f"error: step {step}: {text}")
            damaged = True
    return damaged


def _print_error(text: str) -> None:
    shown = printable_message(text, keep="\n")
    Console(stderr=True).print(
        shown, style="red", markup=False, emoji=False, highlight=False, soft_wrap=True
    )


def open_run(run: str, sealed: bool = True) -> retrace.Run:
    """Open a run or recorded set. If `sealed`, raise TraceError unless a step is sealed."""
    opened = retrace.open_run(run)
    if sealed and not opened.steps():
        raise retrace.TraceError(f"{run}: no step of this run is sealed yet")
    return opened


def print_(text: str) -> None:
    """Print a text as one line."""
    typer.echo(printable(text))


def print_line(text: str) -> None:
    """Print a text as one line, cut to the width of a terminal."""
    console, line = Console(), Text(printable_message(text))
    if console.is_terminal:
        line.truncate(console.width, overflow="ellipsis")
    print_(line.plain)


def end_with(problems: Iterable[str]) -> None:
    """Print each problem as one line; if there are any, exit with the code for damage."""
    lines = list(problems)
    for line in lines:
        print_line(line)
    if lines:
        raise typer.Exit(DAMAGED)


Wide = Annotated[
    bool, typer.Option("--wide", help="Show all columns, even if they do not fit on the terminal.")
]


def print_table(table: Table, wide: bool = False, optional: Sequence[str] = ()) -> None:
    """Print a table. On a terminal, leave out the columns that do not fit, and list them.

    Args:
        table: The table. Columns that do not fit are removed from it.
        wide: Whether to print all columns.
        optional: Headers of the columns that may be left out, in the order in which to remove them.
    """
    console = Console()
    if wide or not console.is_terminal:  # a pipe does not limit the width
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
        print_(f"columns that do not fit ({len(left_out)}): {names}; --wide shows all")


def age(seconds: float) -> str:
    """Return a duration in the largest unit that it reaches, rounded down: '3 d', '5 h', '12 s'."""
    units = {"d": 86_400, "h": 3_600, "m": 60}
    unit = next((unit for unit, size in units.items() if seconds >= size), "s")
    return f"{max(0.0, seconds) // units.get(unit, 1):.0f} {unit}"
