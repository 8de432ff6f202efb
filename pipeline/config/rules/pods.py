"""Rules for pods on a cluster: a pod must have as many GPUs as its worker uses."""

from dataclasses import dataclass

from pipeline.config.launch import PodSettings
from pipeline.config.tree import RunConfig


@dataclass(frozen=True)
class InstalledGpus:
    """GPUs per pod if the run sets no number; None means the number that the layout implies."""

    rollout: int | None = None
    training: int | None = None


def gpus_of(settings: PodSettings, installed: int | None) -> int | None:
    """Return a pod's number of GPUs, set by the run or the installation; None if unset."""
    return installed if settings.gpus is None else settings.gpus


def gpu_problems(config: RunConfig, installed: InstalledGpus) -> list[str]:
    """Return problems with pods that have fewer or more GPUs than their workers use.

    With too few GPUs, a run fails late; surplus GPUs stay idle. A pod without GPUs computes on its
    CPUs, which is valid unless trainer.device is cuda. If trainer.device is cpu, all GPUs of a pod
    stay idle.
    """
    pods, rollout = config.launch.kubernetes, config.actor_rollout_ref.rollout
    problems = _unlike(
        "launch.kubernetes.training.gpus",
        gpus_of(pods.training, installed.training),
        "trainer.n_gpus_per_node",
        config.trainer.n_gpus_per_node,
    )
    problems += _unlike(
        "launch.kubernetes.rollout.gpus",
        gpus_of(pods.rollout, installed.rollout),
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        rollout.tensor_model_parallel_size,
    )
    for name, asked in (("rollout", pods.rollout), ("training", pods.training)):
        gpus = gpus_of(asked, getattr(installed, name))
        if gpus is not None and (gpus == 0) != (config.trainer.device == "cpu"):
            problems += _against_device(f"launch.kubernetes.{name}.gpus", gpus, config)
    return problems


def _against_device(key: str, gpus: int, config: RunConfig) -> list[str]:
    if config.trainer.device == "auto":
        return []
    expected = "0" if gpus else "more than 0"
    return [
        f"{key}: found {gpus} (from the run or the installation), but trainer.device is "
        f"{config.trainer.device}; write {expected}, or trainer.device=auto"
    ]


def _unlike(key: str, found: int | None, used_by: str, used: int) -> list[str]:
    if found in (None, 0, used):
        return []
    return [
        f"{key}: found {found} (from the run or the installation), expected {used}, the same as "
        f"{used_by}, or 0 for a run on CPU; write {key}={used}, or {used_by}={found}"
    ]
