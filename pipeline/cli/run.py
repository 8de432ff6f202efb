"""`retrace run`: check the input, then run the flow in this process."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import retrace
from pipeline.cli.check import check, print_errors


def run_run(path: Path, overrides: Sequence[str]) -> int:
    """Run the flow; the exit code of the command."""
    ready = check(path, overrides)
    if ready is None:
        return 2
    errors = Console(stderr=True)
    try:
        ready.run()
    except retrace.InputError as error:  # the name was taken since, weights were not fetched, ...
        print_errors(error)
        return 2
    except (
        retrace.LaunchError,
        retrace.WaitTimeoutError,
        retrace.StoreError,
        retrace.TraceError,
        OSError,
    ) as error:
        errors.print(f"[red]failed:[/red] {type(error).__name__}")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        errors.print("The same command again goes on from what is committed.")
        return 1
    return 0
