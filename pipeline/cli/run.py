"""`retrace run`: check the input, then run the flow in this process."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

import retrace
from pipeline.cli.check import (
    Config,
    Overrides,
    checked,
    error_console,
    print_errors,
    print_labelled,
)
from pipeline.cli.ending import end_by_signals
from pipeline.errors import LastingError

_GO_ON = "Run the same command again to continue from the last commit."
_GO_ON_ONCE_MENDED = (
    "Fix the cause, then run the same command again to continue from the last commit. If the run "
    "can no longer continue, the command names the settings for a new run."
)


def run(config: Config, overrides: Overrides = None) -> None:
    """Start the run that CONFIG.yaml describes, or continue it.

    An interrupted run continues from its last commit. A finished run stays unchanged.
    """
    raise typer.Exit(end_by_signals(partial(run_run, config, overrides or [])))


def run_run(path: Path, overrides: Sequence[str]) -> int:
    """Run the flow, and return the exit code of the command."""
    ready = checked(path, overrides)
    if ready is None or ready.too_small:
        return 2
    try:
        ready.run()
    except retrace.InputError as error:  # for example a run name that came into use since the check
        print_errors(error)
        return 2
    except (
        retrace.LaunchError,
        retrace.WaitTimeoutError,
        retrace.StoreError,
        retrace.TraceError,
        OSError,
    ) as error:
        console = error_console()
        print_labelled(console, "failed", "red", [str(error)])
        console.print(_GO_ON_ONCE_MENDED if isinstance(error, LastingError) else _GO_ON)
        return 1
    return 0
