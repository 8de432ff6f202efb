"""Rules for pods on a cluster: a pod must have as many GPUs as its worker uses."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.config.keys import value_at
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


def gpu_problems(config: RunConfig, installed: InstalledGpus) -> Iterator[str]:
    """Yield problems with pods that have fewer or more GPUs than their workers use.

    With too few GPUs, a run fails late; surplus GPUs stay idle. A pod without GPUs computes on its
    CPUs, which is valid unless trainer.device is cuda. If trainer.device is cpu, all GPUs of a pod
    stay idle.
    """
    pods, device = config.launch.kubernetes, config.trainer.device
    tp = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    for name, gpus, used_by in (
        ("training", gpus_of(pods.training, installed.training), "trainer.n_gpus_per_node"),
        ("rollout", gpus_of(pods.rollout, installed.rollout), tp),
    ):
        key, used = f"launch.kubernetes.{name}.gpus", value_at(config, used_by)
        found = f"{key}: found {gpus} (from the run or the installation)"
        if gpus not in (None, 0, used):
            yield (
                f"{found}, expected {used}, the same as {used_by}, or 0 for a run on CPU; write "
                f"{key}={used}, or {used_by}={gpus}"
            )
        if gpus is not None and device != "auto" and (gpus == 0) != (device == "cpu"):
            expected = "0" if gpus else "more than 0"
            yield (
                f"{found}, but trainer.device is {device}; write {expected}, or trainer.device=auto"
            )
