"""Whether this machine is large enough for a run whose workers are its processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

from pipeline.config.rules.cuda import cpu_engine_problems, cuda_notes, cuda_problems
from pipeline.config.tree import RunConfig
from pipeline.device import Device, choose_device, too_few_gpus
from pipeline.errors import InputError
from pipeline.hardware import core_count, gpu_pool, memory_size
from pipeline.inputs.writes import Writes
from pipeline.model.families import moe_geometry
from pipeline.run.attempts import attempt_of

_MOST_PER_CORE = 4
"""More processes than this on each core take hours for what takes minutes."""
_WEIGHT = {"bfloat16": 2, "float32": 4}
"""Bytes of a weight by dtype; of a gradient as many at least."""


@dataclass(frozen=True)
class Machine:
    """What processes here can use. Example: Machine(2, 0, 8 << 30, 'cpu')."""

    cores: int
    gpus: int
    memory: int
    """Bytes."""
    device: Device
    """What trainer.device means here; cuda also where `unusable` says why that cannot be."""
    unusable: tuple[str, ...] = ()

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPU{'s' * (self.gpus > 1)}" if self.gpus else ", no GPU"
        where = f"computes on {self.device}"
        return f"{self.cores} cores{gpus}, {decimal(self.memory)} of memory; {where}"


def this_machine(config: RunConfig) -> Machine:
    """The machine of this process, as far as its container, its batch system and
    CUDA_VISIBLE_DEVICES let it."""
    device: Device = "cuda"
    unusable: tuple[str, ...] = ()
    try:
        device = choose_device(config.trainer.device)
    except InputError as error:
        unusable = error.problems
    return Machine(core_count(), len(gpu_pool()), memory_size(), device, unusable)


def machine_problems(
    config: RunConfig,
    writes: Writes | None,
    machine: Machine,
    hf_config: Mapping[str, Any] | None = None,
) -> list[str]:
    """What makes it hopeless to run it on this machine, with numbers.

    On GPUs: some that cannot be used, or fewer of them than the workers need. On the CPU: more
    than four processes of a kind for each core, weights, gradients and optimizer state that do
    not fit into memory, or experts that the engine cannot compute. How much a GPU holds is not
    known here. `hf_config` is the model's config.json; None skips what needs it.
    """
    if machine.unusable:
        return list(machine.unusable)
    if machine.device == "cuda":
        return _gpu_problems(config, machine)
    without = "trainer.device=cpu" if machine.gpus else "no GPU"
    attempt = attempt_of(config, 0)
    most = _MOST_PER_CORE * machine.cores
    problems: list[str] = []
    if config.trainer.device == "auto":  # otherwise the rules of settings have said it
        problems += cuda_problems(config.actor_rollout_ref.actor)
        geometry = None if hf_config is None else moe_geometry(hf_config)
        problems += cpu_engine_problems(config, hf_config, geometry)
    for key, count, what in (
        ("trainer.n_gpus_per_node", attempt.training_ranks, "training ranks"),
        ("launch.rollout_workers", attempt.rollout_workers, "rollout workers"),
    ):
        if count > most:
            problems.append(
                f"{key}: {count} {what} are asked for, but this machine has {machine.cores} cores "
                f"and {without}; use at most {most} (four for each core), or a larger machine"
            )
    if writes is None:
        return problems
    needed = least_memory(config, writes, attempt.rollout_workers)
    if needed > machine.memory:
        problems.append(
            f"actor_rollout_ref.model.path: training and rollout of this model hold "
            f"{decimal(needed)} at least (weights, gradients, optimizer state), but this machine "
            f"has {decimal(machine.memory)} of memory and {without}; use a smaller model, or a "
            "larger machine"
        )
    return problems


def machine_notes(config: RunConfig, machine: Machine) -> list[str]:
    """Where a machine is small for the run: processes share the GPU, or cores, and are slow."""
    attempt = attempt_of(config, 0)
    ranks, workers = attempt.training_ranks, attempt.rollout_workers
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    run = f"(training ranks: {ranks}; rollout workers: {workers}, of TP{tp})"
    if machine.device == "cuda":
        if machine.gpus >= ranks + workers * tp:
            return []
        return [
            f"GPUs of this machine: {machine.gpus}; the run's workers {run} share it: lower "
            "actor_rollout_ref.rollout.gpu_memory_utilization until all fit"
        ]
    notes: list[str] = []
    if config.trainer.device == "auto":  # otherwise the notes on settings have said it
        notes += cuda_notes(config.actor_rollout_ref.actor.megatron)
    wanted = max(ranks, workers)
    if wanted <= machine.cores:
        return notes
    return [*notes, f"cores of this machine: {machine.cores}; the run wants {wanted} {run}"]


def least_memory(config: RunConfig, writes: Writes, workers: int) -> int:
    """Bytes that weights, gradients and optimizer state take, without activations and caches."""
    actor = config.actor_rollout_ref.actor
    weight = _WEIGHT[actor.megatron.dtype]
    engine = _WEIGHT[config.actor_rollout_ref.rollout.dtype]
    gradients = (1 + config.has_critic) * writes.policy
    return writes.checkpoint + gradients + workers * (writes.policy // weight) * engine


def _gpu_problems(config: RunConfig, machine: Machine) -> list[str]:
    attempt = attempt_of(config, 0)
    ranks, workers = attempt.training_ranks, attempt.rollout_workers
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    problem = too_few_gpus(machine.gpus, ranks, workers, tp)
    return [] if problem is None else [problem]
