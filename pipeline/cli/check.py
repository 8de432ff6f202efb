"""`retrace check`: read and check everything that a run needs, and start nothing."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.cli.extras import need_flow
from pipeline.config.errors import InputError
from pipeline.config.load import load_config
from pipeline.config.tree import RunConfig
from pipeline.store.settings import use_settings


def run_check(path: Path, overrides: Sequence[str]) -> int:
    """Check the input of a run; the exit code of the command: 0, or 2 with the errors on stderr."""
    return 2 if load_checked(path, overrides) is None else 0


def load_checked(path: Path, overrides: Sequence[str]) -> RunConfig | None:
    """The settings of a run whose input is right; None after all its errors were printed.

    Prints notes and errors, or what the run is going to be, on stderr.
    """
    console = _console()
    try:
        loaded = load_config(path, overrides)
    except InputError as error:
        print_errors(error)
        console.print("further checks were not made: correct these first")
        return None
    try:
        _print(console, "note", "yellow", loaded.notes)
        need_flow()
        use_settings(loaded.config.store)
        # Imported here: the tokenizer library takes seconds, and wrong settings need it not.
        from pipeline.flows.inputs import check_inputs

        inputs = check_inputs(loaded.config)
    except InputError as error:
        print_errors(error)
        return None
    _print(console, "note", "yellow", inputs.notes)
    geometry = inputs.geometry
    routing = (
        "dense"
        if geometry is None
        else (
            f"{len(geometry.layers)} MoE layers, top-{geometry.topk} of {geometry.experts} experts"
        )
    )
    console.print(
        f"{path} is right: {inputs.prompt_count} prompts, {routing}, routing replay "
        f"{loaded.config.actor_rollout_ref.actor.router_replay.mode}, run {inputs.store.uri}",
        markup=False,
    )
    return loaded.config


def print_errors(error: InputError) -> None:
    """Every problem as a line of its own on stderr."""
    _print(_console(), "error", "red", error.problems)


def _console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _print(console: Console, label: str, colour: str, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(f"[{colour}]{label}:[/{colour}]", end=" ")
        console.print(line, markup=False)
