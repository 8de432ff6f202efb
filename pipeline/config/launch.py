"""Settings for starting workers."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from pipeline.config.section import FOR_WORKERS, OPERATIONAL, Count, Section


class PodSettings(Section):
    """Image and resources for one kind of pod; null keeps the installation's value."""

    image: Annotated[str | None, OPERATIONAL] = Field(
        None,
        description="Container image; null: the installation's image.",
    )
    cpu: Annotated[str | None, OPERATIONAL] = Field(
        None,
        pattern=r"^\d+(\.\d+)?m?$",
        description="CPUs, as both request and limit, for example 8 or 500m; null: the "
        "installation's value.",
    )
    memory: Annotated[str | None, OPERATIONAL] = Field(
        None,
        pattern=r"^\d+(\.\d+)?(Ki|Mi|Gi|Ti|K|M|G|T)$",
        description="Memory, as both request and limit, for example 64Gi; null: the installation's "
        "value.",
    )
    gpus: Annotated[NonNegativeInt | None, OPERATIONAL] = Field(
        None,
        description="Number of GPUs per pod; null: the installation's number. If the installation "
        "sets no number, a rollout pod gets as many GPUs as the rollout's tensor-parallel size, "
        "and a training pod gets as many as trainer.n_gpus_per_node.",
    )


class KubernetesPods(Section):
    """Pods of a run on Kubernetes; other runs ignore these settings."""

    rollout: PodSettings = Field(default_factory=PodSettings)
    training: PodSettings = Field(default_factory=PodSettings)


class Launch(Section):
    """How workers are started, and their time limits."""

    rollout_workers: Annotated[NonNegativeInt | None, OPERATIONAL] = Field(
        None, description="Number of rollout workers; null: 1, or 0 if replay_file is set."
    )
    rollout_shards: Annotated[Count | None, OPERATIONAL] = Field(
        None,
        description="Number of shards in a step's rollout (a shard is the unit of restart); null: "
        "one per worker.",
    )
    max_restarts: Annotated[NonNegativeInt, OPERATIONAL] = Field(
        3,
        description="Maximum number of restarts of all rollout workers together; the same limit "
        "applies to the training ranks. On Kubernetes, the limit applies to each rollout worker "
        "separately.",
    )
    start_timeout_s: Annotated[PositiveFloat, FOR_WORKERS] = Field(
        900.0,
        description="Time limit for starting a worker, in seconds. On Kubernetes, this includes "
        "scheduling the pod and pulling its image.",
    )
    step_timeout_s: Annotated[PositiveFloat, FOR_WORKERS] = Field(
        3600.0, description="Time limit for the rollout or the training of a step, in seconds."
    )
    threads_per_worker: Annotated[Count | None, OPERATIONAL] = Field(
        None,
        description="Number of CPU threads of each worker process; null: an even share of the "
        "machine's cores, but 1 for a model whose hidden_size is below 256; on Kubernetes, the "
        "engines' default.",
    )
    kubernetes: KubernetesPods = Field(default_factory=KubernetesPods)
