"""What the commands that look at a run have in common: opening it, refusing, printing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

import retrace

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder or URI of a run or a recorded set.")
]

_INPUT = 2  # exit code: what was asked for is not there


@contextmanager
def refusing() -> Iterator[None]:
    """Turn what a store or trace lacks into one line and exit code 2."""
    try:
        yield
    except (retrace.StoreError, retrace.TraceError, OSError) as error:
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
