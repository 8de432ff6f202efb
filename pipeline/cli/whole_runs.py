"""`retrace runs`: list the runs of a store, or remove one."""

import re
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.filesize import decimal

import retrace
from pipeline.cli.epilog import LOOKED_AT_STEPS, command_group, epilog
from pipeline.cli.printable import listing, number_text
from pipeline.cli.runs import DAMAGED, Run, age, print_, print_line, print_table, refusing
from pipeline.store.schemes import DEFAULT_STORE, EXAMPLE_STORE
from pipeline.upkeep.remove import removable_run
from pipeline.upkeep.run_list import ListedRun

app = command_group(
    "List the runs of a store, or remove one.",
    epilog(
        "docs/commands.md, docs/trace-format.md",
        "0: done; 1: a run is damaged, or a removal was not confirmed; 2: the run does not exist, "
        "or must not be removed",
        "retrace runs ls",
        f"retrace runs ls {EXAMPLE_STORE}",
        "retrace runs rm quickstart",
    ),
)

_SAYS = {"failed", "damaged", "half removed", "no run"}
"""States whose message is shown below the table."""
_QUOTE = "  | "
_LOGGED = re.compile(r"  \| .*? ERROR \S+: (.*)")
"""Matches an error line that a message quotes from a log; the group is the text of the error."""


@app.command(
    "ls",
    epilog=epilog(
        "docs/commands.md", LOOKED_AT_STEPS, "retrace runs ls", f"retrace runs ls {EXAMPLE_STORE}"
    ),
)
def list_(
    store: Annotated[
        str, typer.Argument(metavar="[STORE]", help="Folder or URI that contains runs.")
    ] = DEFAULT_STORE,
) -> None:
    """List the runs of a store: state, steps, last reward, size, age.

    Damaged runs, and folders that are not runs, are listed as well.
    """
    with refusing():
        found = list(retrace.list_runs(store))
    if not found:
        print_(f"no runs in {store}: it does not exist or is empty")
        return
    now_s = time.time()
    columns: dict[str, Callable[[ListedRun], str]] = {
        "name": lambda run: run.name,
        "state": lambda run: run.state,
        "step": _steps,
        "reward": lambda run: number_text(run.reward, ".3f"),
        "size": lambda run: decimal(run.size),
        "created": lambda run: f"{age(now_s - run.created_s)} ago",
        "last write": lambda run: f"{age(now_s - run.modified_s)} ago",
    }
    print_table(listing(found, columns, left=("name", "state", "created", "last write")))
    for run in found:
        if run.state in _SAYS and run.message:
            print_line(f"{run.name}: {_cause(run.message)}")
    if any(run.state == "damaged" for run in found):
        raise typer.Exit(DAMAGED)


@app.command(
    "rm",
    epilog=epilog(
        "docs/commands.md",
        "0: removed; 1: not confirmed; 2: no run was found, or the run is in progress",
        "retrace runs rm quickstart",
        f"retrace runs rm {EXAMPLE_STORE}/first --yes",
    ),
)
def remove(
    run: Run,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Remove the run even if it is recorded as running, as after kill -9."
        ),
    ] = False,
) -> None:
    """Remove a run from its store, with all samples, routes, policies and checkpoints.

    Logs and TensorBoard files stay. To complete an interrupted removal, run the command again.
    """
    with refusing():
        found = removable_run(run, force)
        if not yes:
            typer.confirm(
                f"Remove {run} ({found.state}, {_steps(found)} steps, {decimal(found.size)})?",
                abort=True,
            )
        print_(f"removed {run}: {decimal(retrace.remove_run(run, force))} freed")


def _cause(message: str) -> str:
    """Return a message's first line or, if the message quotes a log, the error in this log."""
    first, *log = message.splitlines()
    if not log or not first.endswith(":"):
        return first
    errors = [found[1] for line in log if (found := _LOGGED.match(line))]
    quoted = [line.removeprefix(_QUOTE) for line in log if line.startswith(_QUOTE)]
    # If there is no error line, the last line of the quoted log is the best substitute. A message
    # about a killed rank quotes no log, so its second line is the best substitute.
    return [*errors, *quoted[-1:], *log][0]


def _steps(run: ListedRun) -> str:
    if run.state in ("no run", "damaged", "half removed"):
        return "—"
    total = "" if run.total_steps is None else f"/{run.total_steps}"
    return f"{run.finished_steps}{total}"
