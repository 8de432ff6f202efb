"""Functions that check the input of a run, and run it in this process."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError
from pipeline.extras import need
from pipeline.inputs.sizes.memory import Memory
from pipeline.inputs.writes import Writes
from pipeline.model.geometry import Geometry
from pipeline.store.settings import use_settings
from retrace.opened import Run, open_run

if TYPE_CHECKING:
    from pipeline.config.tree import RunConfig
    from pipeline.inputs.checked import CheckedInputs

Config = str | Path | Mapping[str, Any]
Overrides = Mapping[str, Any] | Sequence[str]

# Defaults for a run in this process; the user's own variables take precedence. They must be set
# before Prefect is imported.
_PREFECT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # The terminal shows the run's own display; Prefect's log lines appear only in its UI.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    # The run's own server starts slowly on a busy machine. The wait is shown, and ends at once if
    # the server's process ends.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "1800",
}


@dataclass(frozen=True)
class ReadyRun:
    """A run whose input has been checked. The check wrote no objects and started no process."""

    uri: str
    """The URI of the run. If a run with this name and input exists, `run` continues it."""
    prompts: int
    """The number of training prompts, excluding those dropped because of their length."""
    val_prompts: int
    """The number of validation prompts; 0 if the run does not validate."""
    geometry: Geometry | None
    """Experts, top-k and MoE layers of the model; None for a dense model."""
    writes: Writes | None
    """The estimated number of bytes that the run writes to its store. None if the model is not on
    this machine and its size is unknown."""
    settings: Mapping[str, Any] = field(repr=False)
    """The resolved settings, as nested groups."""
    notes: tuple[str, ...]
    """Facts for the user that are not errors, such as keys without effect."""
    memory: Memory
    """The memory that the run needs. This is main memory if the machine has no GPUs and is large
    enough for the run, and GPU memory in all other cases."""
    machine: str
    """The cores, GPUs and memory of this machine, and the device on which the run computes."""
    local_folder: Path
    """The folder for logs and TensorBoard files on this machine."""
    too_small: tuple[str, ...]
    """The reasons why this machine is too small for the run; empty if it is large enough. `run`
    raises an InputError with these reasons."""
    _inputs: "CheckedInputs" = field(repr=False)

    def gpu_memory(self) -> Memory:
        """Return the GPU memory that the run needs, even if `memory` describes main memory."""
        from pipeline.inputs.sizes.estimate import estimate_memory

        return estimate_memory(self._inputs.config, self._inputs.model.config)

    def gpu_memory_problems(self, limit: int) -> list[str]:
        """Return the reasons why training ranks or engines do not fit on GPUs of `limit` bytes.

        Each text names settings that would help. The list is empty if everything fits according to
        the estimate that docs/sizes.md describes.
        """
        from pipeline.inputs.sizes.verdict import gpu_verdict

        verdict = gpu_verdict(self._inputs.config, limit)
        return [] if verdict is None else verdict[1]

    def run(self) -> Run:
        """Carry out the checked run in this process, as `retrace.run` does."""
        # Imported here because readers of traces do not need rich.
        from rich.console import Console

        from pipeline.inputs.stage import staged_change
        from pipeline.report.display import Display
        from pipeline.report.folders import local_folder
        from pipeline.report.outcome import is_complete, report
        from pipeline.run.attempts import claimed
        from pipeline.run.owner import this_owner

        config, store = self._inputs.config, self._inputs.store
        if is_complete(config, store):  # skip Prefect, which takes seconds to start
            Console(stderr=True, highlight=False, soft_wrap=True).print(
                f"{self.uri}: finished, nothing is left to do", markup=False
            )
            report(config, store)
            return open_run(self.uri)
        if self.too_small:
            raise InputError(self.too_small)
        if config.actor_rollout_ref.actor.router_replay.replay_file is None:
            need("rollout-cpu", "a rollout worker")
        need("training", "a training rank")
        for name, value in _PREFECT.items():
            os.environ.setdefault(name, value)
        with Display(Console(stderr=True)) as display:
            show = partial(display.phase, "flow")
            # Before anything else, so that a second start of the run writes nothing.
            change = partial(staged_change, self._inputs)
            with claimed(store, config, this_owner(), show=show, change=change) as claim:
                show("starting Prefect")
                from pipeline.flows.server import prefect_server

                with prefect_server(local_folder(config), show) as server:
                    from pipeline.flows.local import run_flow  # slow, while the server starts

                    run = open_run(run_flow(self._inputs, claim, display, server))
        report(config, run.store)
        return run


def check(config: Config, overrides: Overrides = (), **groups: Any) -> ReadyRun:
    """Read and check all input of a run, without starting or storing anything.

    Settings in `config` are replaced first by `overrides`, then by `groups`. A value that is a
    mapping is merged into the group of that name. Relative paths are relative to the working
    directory. The `store.*` settings become environment variables of this process, so that workers
    inherit them.

    Args:
        config: A settings file, or its content as a mapping.
        overrides: A mapping from dotted keys to values, such as
            {"trainer.total_training_steps": 2}, or strings as on the command line, such as
            ["trainer.total_training_steps=2"].
        **groups: Groups of settings as keyword arguments, such as
            trainer={"total_training_steps": 2}. A dotted key cannot be a keyword argument.

    Returns:
        The checked run; its `run` method starts it.

    Raises:
        InputError: The input cannot be used. The error's `problems` lists all problems, and its
            `notes` lists other facts about settings, such as keys without effect.
    """
    # Imported here because readers of traces do not need pydantic and YAML.
    from pipeline.config.reading.load import SettingsError, load_config

    try:
        loaded = load_config(config, [*_in_order(overrides), *groups.items()])
    except SettingsError as error:
        raise _with_problems_of_rest(error.problems, error.wrong, error.rest) from error
    except InputError as error:
        error.add_note("further checks were skipped: correct these problems first")
        raise
    need("flow", "a run")
    from pipeline.inputs.machine import (
        machine_notes,
        machine_problems,
        needed_notes,
        this_machine,
    )

    try:
        use_settings(loaded.config.store)
        # Imported here because loading the tokenizer library takes seconds.
        from pipeline.inputs.check import check_inputs
        from pipeline.inputs.sizes.estimate import estimate_memory
        from pipeline.report.folders import local_folder

        inputs = check_inputs(loaded.config)
    except InputError as error:
        here = machine_problems(loaded.config, None, this_machine(loaded.config))
        error.notes = (*loaded.notes, *here)
        raise
    machine = this_machine(inputs.config)
    hf_config = inputs.model.config
    too_small = tuple(machine_problems(inputs.config, inputs.writes, machine, hf_config))
    slow = () if too_small else machine_notes(inputs.config, machine)
    local = machine.gpus == 0 and not too_small
    return ReadyRun(
        uri=inputs.store.uri,
        prompts=inputs.prompt_count,
        val_prompts=inputs.val_prompt_count,
        geometry=inputs.geometry,
        writes=inputs.writes,
        memory=estimate_memory(inputs.config, inputs.model.config, local=local),
        settings=inputs.config.model_dump(mode="json"),
        notes=(*loaded.notes, *inputs.notes, *needed_notes(inputs.config), *slow),
        machine=str(machine),
        local_folder=local_folder(inputs.config),
        too_small=too_small,
        _inputs=inputs,
    )


def run(config: Config, overrides: Overrides = (), **groups: Any) -> Run:
    """Check a run's input, run it to its end, and open it.

    The flow runs in this process and prints its progress. The workers are processes on this
    machine. If a run with the same name was interrupted, it continues; if it is finished, it is
    just opened. To check now and run later, call `ready = check(...)`, then `ready.run()`.

    The run uses the Prefect server that PREFECT_API_URL names, or starts its own. Prefect reads its
    settings from the environment when it is imported. Before the import, this function therefore
    sets the variables that Retrace needs, except those that are already set.

    Args:
        config: As in `check`.
        overrides: As in `check`.
        **groups: As in `check`.

    Returns:
        The finished run.

    Raises:
        InputError: The input cannot be used; no process was started.
        LaunchError: Workers could not start or ended too often.
        WaitTimeoutError: An object did not appear in time.
        StoreError: The store failed.
        TraceError: A stored object is invalid.
    """
    return check(config, overrides, **groups).run()


def import_verl(source: str | Path, arguments: Sequence[str] = ()) -> str:
    """Return the text of a settings file for a verl job, with a TODO for each open decision.

    bash evaluates a script with the environment variables of this process, but does not start
    programs or write files.

    Args:
        source: A shell script that starts verl.trainer.main_ppo, a YAML file for verl, or a folder
            of such files if `arguments` contains `--config-name=NAME`. YAML with `defaults` or
            `${...}` needs the extra `verl`.
        arguments: Further arguments from verl's command line.

    Raises:
        InputError: The job cannot be read or resolved; the message names the line or key.
    """
    # Imported here because readers of traces do not need pydantic and YAML.
    from pipeline.config.imports.job import import_verl as import_job

    return import_job(Path(source), arguments, os.environ)


def _with_problems_of_rest(
    problems: Sequence[str], wrong: Collection[str], rest: "RunConfig | None"
) -> InputError:
    """Return an error with the given problems and further problems that do not depend on them.

    `wrong` contains the keys of the invalid settings. `rest` contains the other settings, or is
    None if these cannot be checked.
    """
    more: list[str] = []
    if rest is not None:
        try:
            need("flow", "a run")
        except InputError as lacking:
            return InputError([*problems, *lacking.problems])
        from pipeline.inputs.check import part_problems

        use_settings(rest.store)
        depends = re.compile("|".join(_mentions(key) for key in wrong) or "(?!)")
        more = [text for text in part_problems(rest) if not depends.search(text)]
    error = InputError([*problems, *more])
    error.add_note("checks that depend on invalid settings were skipped: correct these first")
    return error


def _mentions(key: str) -> str:
    """Return a pattern for texts that mention a setting, for example as `model.path` or `path=`."""
    *groups, name = map(re.escape, key.split("."))
    return rf"\b{'[.]'.join([*groups[-1:], name])}\b|(?<![.\w]){name}="


def _in_order(overrides: Overrides) -> Sequence[str | tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    return [overrides] if isinstance(overrides, str) else overrides
