"""Settings of the workers' start: a part of the tree."""

from pydantic import Field

from pipeline.config.section import FOR_WORKERS, OPERATIONAL, Section


class PodSettings(Section):
    """Pods of one kind in this run, in place of the installation's values."""

    image: str | None = Field(
        None, json_schema_extra=OPERATIONAL, description="Image; null: the installation's."
    )
    cpu: str | None = Field(
        None,
        json_schema_extra=OPERATIONAL,
        pattern=r"^\d+(\.\d+)?m?$",
        description="Processors, requested and at most: 8, 500m; null: the installation's.",
    )
    memory: str | None = Field(
        None,
        json_schema_extra=OPERATIONAL,
        pattern=r"^\d+(\.\d+)?(Ki|Mi|Gi|Ti|K|M|G|T)?$",
        description="Memory, requested and at most: 64Gi; null: the installation's.",
    )
    gpus: int | None = Field(
        None,
        ge=0,
        json_schema_extra=OPERATIONAL,
        description="GPUs of a pod; null: the installation's, which follows rollout's tensor "
        "parallel size and trainer.n_gpus_per_node.",
    )


class KubernetesPods(Section):
    """Pods of a run on Kubernetes; runs elsewhere have none."""

    rollout: PodSettings = Field(default_factory=PodSettings)
    training: PodSettings = Field(default_factory=PodSettings)


class Launch(Section):
    """How workers start and how long they may take."""

    rollout_workers: int | None = Field(
        None,
        ge=0,
        json_schema_extra=OPERATIONAL,
        description="Rollout workers; null: 1, or 0 with replay_file.",
    )
    rollout_shards: int | None = Field(
        None,
        ge=1,
        json_schema_extra=OPERATIONAL,
        description="Shards of a step's rollout (the unit of restart); null: one per worker.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        json_schema_extra=OPERATIONAL,
        description="Restarts of a stage's workers; on Kubernetes, of each rollout worker and of "
        "the training gang.",
    )
    start_timeout_s: float = Field(
        900.0,
        gt=0,
        json_schema_extra=FOR_WORKERS,
        description="Longest start of a worker; on Kubernetes also of its pod: scheduling, image.",
    )
    step_timeout_s: float = Field(
        3600.0, gt=0, json_schema_extra=FOR_WORKERS, description="Longest rollout or training step."
    )
    threads_per_worker: int | None = Field(
        None,
        ge=1,
        json_schema_extra=OPERATIONAL,
        description="CPU threads of each worker process; null: cores shared evenly, or on "
        "Kubernetes what the engines choose.",
    )
    kubernetes: KubernetesPods = Field(default_factory=KubernetesPods)
