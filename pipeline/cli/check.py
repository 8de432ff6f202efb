"""`retrace check`: read and check everything that a run needs, and start nothing."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

import retrace
from pipeline.store import is_remote, open_store


def run_check(path: Path, overrides: Sequence[str]) -> int:
    """Check the input of a run; the exit code of the command: 0, or 2 with the errors on stderr."""
    return 2 if check(path, overrides) is None else 0


def check(path: Path, overrides: Sequence[str]) -> retrace.ReadyRun | None:
    """The run whose input is right; None after all errors were printed.

    Prints notes and errors, or what the run is going to be, on stderr.
    """
    console = _console()
    console.print(f"checking {path}", markup=False)  # tokenizers and prompts take a while
    if (line := _finished_line(path, overrides)) is not None:
        console.print(line, markup=False)
    try:
        ready = retrace.check(path, overrides)
    except retrace.InputError as error:
        print_errors(error)
        return None
    _print(console, "note", "yellow", ready.notes)
    routing = "dense"
    if (geometry := ready.geometry) is not None:
        routing = (
            f"{len(geometry.layers)} MoE layers, top-{geometry.topk} of {geometry.experts} experts"
        )
    mode = ready.settings["actor_rollout_ref"]["actor"]["router_replay"]["mode"]
    console.print(
        f"{path} is right: {ready.prompts} prompts, {routing}, routing replay {mode}, "
        f"run {ready.uri}",
        markup=False,
    )
    if ready.writes is not None:
        console.print(writes_line(ready.writes), markup=False)
    return ready


def writes_line(writes: retrace.Writes) -> str:
    """How much a run writes into its store, for people."""
    routes = f", routes up to {decimal(writes.routes)}" if writes.routes else ""
    when = "every step"
    if writes.save_freq > 1:
        when = f"every {writes.save_freq} steps and at the end"
    return (
        f"it writes per step: a policy of {decimal(writes.policy)}, samples up to "
        f"{decimal(writes.samples)}{routes}; {when} "
        f"a checkpoint of about {decimal(writes.checkpoint)}"
    )


def _finished_line(path: Path, overrides: Sequence[str]) -> str | None:
    """What to say of a run that is finished, before its inputs are checked, which takes seconds."""
    # Imported here: they take a second, in which the first line should stand already.
    from pipeline.config.reading.load import load_config
    from pipeline.report.outcome import finished_line

    try:
        config = load_config(path, overrides).config
        # A server that does not answer is waited for by the check alone.
        return None if is_remote(config.store.uri) else finished_line(open_store(config.run_uri))
    except (retrace.InputError, retrace.StoreError):
        return None  # the check says what is wrong


def print_errors(error: retrace.InputError) -> None:
    """Notes, then every problem as a line of its own, then what was not checked, on stderr."""
    console = _console()
    _print(console, "note", "yellow", error.notes)
    _print(console, "error", "red", error.problems)
    for line in getattr(error, "__notes__", ()):
        console.print(line, markup=False)


def _console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _print(console: Console, label: str, colour: str, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(f"[{colour}]{label}:[/{colour}]", end=" ")
        console.print(line, markup=False)
