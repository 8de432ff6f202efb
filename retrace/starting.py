"""Checking a run's input, and running it in this process."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
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

# Defaults for an embedded run; anything the user has set wins. Set before Prefect is imported.
_PREFECT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # The terminal shows the run's own display; Prefect's log lines stay in its UI.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    # The run's own server shares the cores with a start of other things.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}


@dataclass(frozen=True)
class ReadyRun:
    """A run whose input is right. Nothing of it is in the store yet, and nothing was started."""

    uri: str
    """Where its objects will lie, or lie: a run of that name and input is attached to."""
    prompts: int
    """Training prompts, those dropped for their length not counted."""
    val_prompts: int
    """Validation prompts; 0: no validation."""
    geometry: Geometry | None
    """Experts, top-k and MoE layers of the model; None: a dense model."""
    writes: Writes | None
    """How much it writes into its store; None: its model is not here and does not say its size."""
    settings: Mapping[str, Any] = field(repr=False)
    """The resolved settings, as groups within groups."""
    notes: tuple[str, ...]
    """What its user should know though it is no error, such as keys without effect."""
    memory: Memory
    """How much memory it needs: on GPUs, or on this machine if it has none and can run it."""
    machine: str
    """What this machine has: cores, GPUs, memory; and what the run computes on."""
    local_folder: Path
    """Where logs and TensorBoard files lie on this machine."""
    too_small: tuple[str, ...]
    """Why this machine cannot run it, if it cannot; `run` raises InputError with these."""
    _inputs: "CheckedInputs" = field(repr=False)

    def gpu_memory(self) -> Memory:
        """How much memory it needs on GPUs, also where `memory` is that of this machine."""
        from pipeline.inputs.sizes.estimate import estimate_memory

        return estimate_memory(self._inputs.config, self._inputs.model.config)

    def gpu_memory_problems(self, limit: int) -> list[str]:
        """Why its training ranks or engines do not fit into GPUs of `limit` bytes, with settings
        that would help; [] if they do by the estimate of docs/sizes.md."""
        from pipeline.inputs.sizes.limit import memory_problems

        experts = 0 if self.geometry is None else self.geometry.experts
        return memory_problems(self._inputs.config, self.gpu_memory(), limit, experts)

    def run(self) -> Run:
        """Run it in this process, as `retrace.run` does."""
        # Imported here: readers of traces have no use for rich.
        from rich.console import Console

        from pipeline.report.display import Display
        from pipeline.report.folders import local_folder
        from pipeline.report.outcome import is_complete, report

        config, store = self._inputs.config, self._inputs.store
        if is_complete(config, store):  # without Prefect, which takes seconds to start
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
            display.phase("flow", "starting Prefect")
            from pipeline.flows.server import prefect_server

            with prefect_server(local_folder(config)) as server:
                from pipeline.flows.local import run_flow  # seconds, while it starts

                run = open_run(run_flow(self._inputs, display, server))
        report(config, run.store)
        return run


def check(config: Config, overrides: Overrides = (), **groups: Any) -> ReadyRun:
    """Read and check everything that a run needs; start nothing, and write nothing into the run.

    `config` is a settings file, or its content as a mapping. What replaces its settings:

    - `overrides`, a mapping by dotted key: {"trainer.total_training_steps": 2}; or texts as on the
      command line: ["trainer.total_training_steps=2"].
    - `groups`, a group of settings by keyword, since a dotted key is no identifier:
      trainer={"total_training_steps": 2}. They come last.

    A value that is a mapping is merged into the group it replaces. Relative paths are relative to
    the working directory. The settings `store.*` become environment variables of this process,
    which is how workers get them.

    Raises InputError with all problems; in `notes`, what is to be known of settings besides.
    """
    # Imported here: readers of traces have no use for pydantic and YAML.
    from pipeline.config.reading.load import SettingsError, load_config

    try:
        loaded = load_config(config, [*_in_order(overrides), *groups.items()])
    except SettingsError as error:
        raise _with_problems_of_rest(error.problems, error.wrong, error.rest) from error
    except InputError as error:
        error.add_note("further checks were not made: correct these first")
        raise
    try:
        need("flow", "a run")
        use_settings(loaded.config.store)
        # Imported here: the tokenizer library takes seconds.
        from pipeline.inputs.check import check_inputs
        from pipeline.inputs.machine import machine_notes, machine_problems, this_machine
        from pipeline.inputs.sizes.estimate import estimate_memory
        from pipeline.report.folders import local_folder

        inputs = check_inputs(loaded.config)
    except InputError as error:
        error.notes = loaded.notes
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
        notes=(*loaded.notes, *inputs.notes, *slow),
        machine=str(machine),
        local_folder=local_folder(inputs.config),
        too_small=too_small,
        _inputs=inputs,
    )


def run(config: Config, overrides: Overrides = (), **groups: Any) -> Run:
    """Check a run's input, run it to its end, and open it; `config` and the rest as for `check`.

    The flow runs in this process, its workers are processes of this machine, and progress is
    printed. A run of that name which was interrupted goes on; one that is finished is opened. To
    check first and run later: `ready = check(...)`, `ready.run()`.

    It starts a Prefect server for itself, or uses that of PREFECT_API_URL. Prefect reads its
    settings from the environment when it is imported, so variables that are not set get Retrace's
    defaults here.

    Raises InputError before anything starts; LaunchError when workers cannot start or end too
    often; WaitTimeoutError when an object does not appear in time; StoreError; TraceError.
    """
    return check(config, overrides, **groups).run()


def _with_problems_of_rest(
    problems: Sequence[str], wrong: Collection[str], rest: "RunConfig | None"
) -> InputError:
    """Wrong settings, and what else is wrong as far as it does not depend on them."""
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
    error.add_note("what depends on wrong settings was not checked: correct them first")
    return error


def _mentions(key: str) -> str:
    """A pattern of texts about a setting: `model.path`, `path=`."""
    *groups, name = map(re.escape, key.split("."))
    return rf"\b{'[.]'.join([*groups[-1:], name])}\b|(?<![.\w]){name}="


def _in_order(overrides: Overrides) -> Sequence[str | tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    return [overrides] if isinstance(overrides, str) else overrides
