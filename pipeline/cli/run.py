"""`retrace run`: check the input, then run the flow in this process."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.cli.check import load_checked, print_errors
from pipeline.config.errors import InputError
from pipeline.launch.base import StageFailedError
from pipeline.store import StoreError
from pipeline.store.wait import WaitTimeoutError
from pipeline.traces import TraceError

# Defaults for an embedded run; anything the user has set wins. Set before Prefect is imported.
_PREFECT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # The terminal shows the run's own display; Prefect's log lines stay in its UI.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    # The ephemeral server shares the cores with a start of other things.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}


def run_run(path: Path, overrides: Sequence[str]) -> int:
    """Run the flow; the exit code of the command."""
    config = load_checked(path, overrides)
    if config is None:
        return 2
    for name, value in _PREFECT.items():
        os.environ.setdefault(name, value)
    from pipeline.flows.run import run_flow

    errors = Console(stderr=True)
    try:
        _refuse_unreachable_server()
        run_flow(config)
    except InputError as error:  # another flow took the name since, weights were not fetched, ...
        print_errors(error)
        return 2
    except (StageFailedError, WaitTimeoutError, StoreError, TraceError, OSError) as error:
        errors.print(f"[red]failed:[/red] {type(error).__name__}")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        errors.print("The same command again goes on from what is committed.")
        return 1
    except KeyboardInterrupt:
        errors.print("stopped; the same command again goes on from what is committed")
        return 130
    return 0


def _refuse_unreachable_server() -> None:
    """Raise InputError if the user named a Prefect server and it does not answer."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    if url is None:
        return
    error = get_client(sync_client=True).api_healthcheck()
    if error is not None:
        raise InputError(
            [
                f"PREFECT_API_URL: found {url}, which cannot be reached: {error}; start that "
                "server, or unset the variable to use an embedded one"
            ]
        ) from error
