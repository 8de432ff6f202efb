"""Rules of pods on a cluster: a pod has as many GPUs as its worker uses."""

from dataclasses import dataclass

from pipeline.config.launch import PodSettings
from pipeline.config.tree import RunConfig


@dataclass(frozen=True)
class InstalledGpus:
    """The installation's GPUs per pod, for runs that set none; None: as many as the run implies."""

    rollout: int | None = None
    training: int | None = None


def gpus_of(settings: PodSettings, installed: int | None) -> int | None:
    """The GPUs of a pod: the run's setting, else the installation's; None: as the run implies."""
    return installed if settings.gpus is None else settings.gpus


def gpu_problems(config: RunConfig, installed: InstalledGpus) -> list[str]:
    """Find pods with fewer GPUs than are used, which fail late, or with more, which stay idle.

    0 is right: a pod without GPUs computes on its CPUs, unless trainer.device is cuda. With cpu
    any other number stays idle.
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
        f"{key}: found {gpus} (of the run, or else of the installation), but trainer.device is "
        f"{config.trainer.device}; write {expected}, or trainer.device=auto"
    ]


def _unlike(key: str, found: int | None, used_by: str, used: int) -> list[str]:
    if found in (None, 0, used):
        return []
    return [
        f"{key}: found {found} (of the run, or else of the installation), expected {used} like "
        f"{used_by}, or 0 for a run on CPU; write {key}={used}, or {used_by}={found}"
    ]
