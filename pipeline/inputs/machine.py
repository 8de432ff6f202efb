"""Checks that a machine is large enough for a run that starts its workers on this machine."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from pipeline.config.rules.check import cpu_problems
from pipeline.config.rules.cuda import cuda_notes, needed_modules
from pipeline.config.rules.overrides import Overrides, set_overrides
from pipeline.config.tree import RunConfig
from pipeline.device import Device, ask, choose_device, too_few_gpus
from pipeline.errors import InputError
from pipeline.hardware import core_count, gpu_pool, memory_size
from pipeline.inputs.writes import Writes
from pipeline.loopback import is_loopback
from pipeline.run.attempts import attempt_of

_MOST_PER_CORE = 4
"""Maximum number of processes per core. With more processes, minutes of work would take hours."""
_ANSWER_S = 8.0
"""Seconds within which the server that PREFECT_API_URL names must answer."""
_WEIGHT = {"bfloat16": 2, "float32": 4}
"""Bytes per weight, keyed by dtype; a gradient takes at least as many bytes."""


@dataclass(frozen=True)
class Machine:
    """The resources of this machine that a run can use. Example: Machine(2, 0, 8 << 30, 'cpu')."""

    cores: int
    gpus: int
    memory: int
    """The size of the memory in bytes."""
    device: Device
    """The device that trainer.device selects; cuda if the selection fails (see `unusable`)."""
    unusable: tuple[str, ...] = ()
    """The reasons why no device could be selected; empty if the run can use the device."""

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPU{'s' * (self.gpus > 1)}" if self.gpus else ", no GPU"
        where = f"computes on {self.device}"
        return f"{self.cores} cores{gpus}, {decimal(self.memory)} of memory; {where}"


def this_machine(config: RunConfig) -> Machine:
    """Return the resources of this machine that the process may use.

    The process's container, its batch system and CUDA_VISIBLE_DEVICES may limit them.
    """
    device: Device = "cuda"
    unusable: tuple[str, ...] = ()
    try:
        device = choose_device(config.trainer.device)
    except InputError as error:
        unusable = error.problems
    return Machine(core_count(), len(gpu_pool()), memory_size(), device, unusable)


def check_prefect() -> None:
    """Raise InputError if PREFECT_API_URL names a server that does not answer."""
    import httpx

    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return  # the run starts its own server
    try:
        # The certificate is checked later, by Prefect's client, which has its own settings for it.
        status = httpx.get(
            f"{url.rstrip('/')}/health",
            timeout=_ANSWER_S,
            trust_env=not is_loopback(url),
            verify=False,
        ).status_code
        why = None if status < httpx.codes.INTERNAL_SERVER_ERROR else f"it answers {status}"
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as error:
        why = str(error) or type(error).__name__
    if why is not None:
        fix = "start that server, or unset the variable to use an embedded one"
        if "://" not in url:
            fix = f"write http://{url}"
        raise InputError([f"PREFECT_API_URL: found {url}, which cannot be reached: {why}; {fix}"])


def override_problems(config: RunConfig, folder: Path | None) -> list[str]:
    """Ask the packages that are installed here about the fields that the settings override.

    Args:
        config: Settings of the run.
        folder: The model's folder, if Megatron-core's settings can be built for it; otherwise None.
    """
    groups = [group for group, _ in set_overrides(config) if _is_installed(group)]
    if not groups:
        return []
    given = {"settings": config.model_dump(mode="json"), "folder": folder and str(folder)}
    packages = " and ".join(dict.fromkeys(group.package for group in groups))
    found: list[str] = ask("overrides", groups[0].key, packages, given)["problems"]
    return found


def override_notes(config: RunConfig, on_cluster: bool) -> Iterator[str]:
    """Yield a note on each group of overridden fields that only a worker can check."""
    for group, _ in set_overrides(config):
        if on_cluster or not _is_installed(group):
            why = "workers run in pods" if on_cluster else f"{group.package} is not installed here"
            yield f"{group.key}: its fields are checked when the workers start, because {why}"


def _is_installed(group: Overrides) -> bool:
    return find_spec(group.package) is not None


def machine_problems(
    config: RunConfig,
    writes: Writes | None,
    machine: Machine,
    hf_config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the reasons why a run with these settings is impossible on this machine.

    On GPUs, the run is impossible if the GPUs are unusable, if the workers need more GPUs than the
    machine has, or if a setting requires a package that is not installed. The memory of GPUs is not
    checked. On the CPU, it is impossible if the weights,
    gradients and optimizer state do not fit in memory, or if the engine or the trainer does not
    support these settings. More than four training ranks per core are also refused, as are more
    than four rollout workers per core.

    Args:
        config: Settings of the run.
        writes: Sizes of the model; None skips the memory check.
        machine: This machine.
        hf_config: The model's config.json; None skips the checks that need it.
    """
    if machine.unusable:
        return list(machine.unusable)
    if machine.device == "cuda":
        return [*gpu_problems(config, machine), *_missing_packages(config)]
    without = "trainer.device=cpu" if machine.gpus else "no GPU"
    attempt = attempt_of(config, 0)
    most = _MOST_PER_CORE * machine.cores
    problems: list[str] = []
    if config.trainer.device == "auto":  # the settings' own rules check other values
        problems += cpu_problems(config, hf_config)
    for key, count, what in (
        ("trainer.n_gpus_per_node", attempt.training_ranks, "training ranks"),
        ("launch.rollout_workers", attempt.rollout_workers, "rollout workers"),
    ):
        if count > most:
            problems.append(
                f"{key}: found {count} {what}, but this machine has {machine.cores} cores and "
                f"{without}; use at most {most} (four per core), or a larger machine"
            )
    if writes is None:
        return problems
    needed = least_memory(config, writes, attempt.rollout_workers)
    if needed > machine.memory:
        problems.append(
            f"actor_rollout_ref.model.path: training and rollout of this model need at least "
            f"{decimal(needed)} (weights, gradients, optimizer state), but this machine has "
            f"{decimal(machine.memory)} of memory and {without}; use a smaller model, or a larger "
            "machine"
        )
    return problems


def needed_notes(config: RunConfig) -> list[str]:
    """Return notes on the packages that settings require on GPUs, and whether they are installed.

    These packages are not dependencies of Retrace.
    """
    if config.trainer.device == "cpu":
        return []
    return [
        f"{setting} requires {package} where training ranks run; it is "
        f"{'' if find_spec(module) else 'not '}installed here"
        for setting, module, package in needed_modules(config.actor_rollout_ref.actor.megatron)
    ]


def _missing_packages(config: RunConfig) -> Iterator[str]:
    for setting, module, package in needed_modules(config.actor_rollout_ref.actor.megatron):
        if find_spec(module) is None:
            yield (
                f"{setting} requires {package}, but there is no module {module} here; install the "
                "package, or leave the setting out"
            )


def machine_notes(config: RunConfig, machine: Machine) -> list[str]:
    """Return notes for a small machine, on which several processes share a GPU or core."""
    attempt = attempt_of(config, 0)
    ranks, workers = attempt.training_ranks, attempt.rollout_workers
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    run = f"(training ranks: {ranks}; rollout workers: {workers}, of TP{tp})"
    if machine.device == "cuda":
        if machine.gpus >= ranks + workers * tp:
            return []
        return [
            f"GPUs on this machine: {machine.gpus}; the run's workers {run} share it; lower "
            "actor_rollout_ref.rollout.gpu_memory_utilization until all fit"
        ]
    notes: list[str] = []
    if config.trainer.device == "auto":  # the settings' own notes cover other values
        notes += cuda_notes(config.actor_rollout_ref.actor.megatron)
    wanted = max(ranks, workers)
    if wanted <= machine.cores:
        return notes
    return [*notes, f"cores of this machine: {machine.cores}; the run needs {wanted} {run}"]


def engines_on_one_gpu(config: RunConfig, machine: Machine) -> int:
    """Return the number of engines that share a machine's only GPU with the training rank."""
    return attempt_of(config, 0).rollout_workers if machine.gpus == 1 else 0


def least_memory(config: RunConfig, writes: Writes, workers: int) -> int:
    """Return the size in bytes of the weights, gradients and optimizer state of all workers.

    Activations and caches are not included.

    Args:
        config: Settings of the run.
        writes: Sizes of the policy and of a checkpoint.
        workers: The number of rollout workers, each with a copy of the weights.
    """
    actor = config.actor_rollout_ref.actor
    weight = _WEIGHT[actor.megatron.dtype]
    engine = _WEIGHT[config.actor_rollout_ref.rollout.dtype]
    gradients = (1 + config.has_critic) * writes.policy
    return writes.checkpoint + gradients + workers * (writes.policy // weight) * engine


def gpu_problems(config: RunConfig, machine: Machine) -> list[str]:
    """Return a problem if this machine has too few GPUs for the run (at most one)."""
    attempt = attempt_of(config, 0)
    ranks, workers = attempt.training_ranks, attempt.rollout_workers
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    problem = too_few_gpus(machine.gpus, ranks, workers, tp)
    return [] if problem is None else [problem]
