"""What the commands that look at a run have in common: opening it, refusing, printing."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from pipeline.store import Store, StoreError, keys, open_store
from pipeline.traces import TraceError
from pipeline.traces.manifest import sealed_steps

Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder or URI of a run or a record set.")]

_RUN_OBJECT = re.compile(r"[^/]+/(run\.json|steps/\d{6}/manifest\.json)")
_INPUT = 2  # exit code: what was asked for is not there


@contextmanager
def refusing() -> Iterator[None]:
    """Turn what a store or trace lacks into one line and exit code 2."""
    try:
        yield
    except (StoreError, TraceError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(_INPUT) from error


def open_run(run: str, sealed: bool = True) -> Store:
    """The store of a run or record set; `sealed`: with a step to look at."""
    store = open_store(run)
    if sealed_steps(store) or (not sealed and store.size(keys.run_json()) is not None):
        return store
    if store.size(keys.run_json()) is not None:
        raise TraceError(f"{run}: no step of this run is sealed yet")
    runs = sorted(
        {info.key.split("/")[0] for info in store.list("") if _RUN_OBJECT.fullmatch(info.key)}
    )
    if runs:
        base = run.rstrip("/")
        raise TraceError(
            f"{run}: a store of {len(runs)} runs; give one of them: "
            + ", ".join(f"{base}/{name}" for name in runs)
        )
    raise TraceError(
        f"{run}: no sealed step there; give the folder or URI of a run "
        "(such as outputs/store/quickstart) or of a record set"
    )


def print_(what: Any) -> None:
    """Print a text as it is, or a table."""
    # Cut to the terminal a table would hide experts; a pipe has no width to keep to.
    console = Console()
    if not console.is_terminal:
        console = Console(width=1_000)
    console.print(what, markup=False, highlight=False, soft_wrap=isinstance(what, str))
