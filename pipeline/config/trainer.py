"""The run itself: its name, steps, checkpoints and ranks; a part of the tree."""

import hashlib
import re
from typing import Literal

from pydantic import Field

from pipeline.config.section import FOR_WORKERS, OPERATIONAL, Section, formerly

_LONGEST = 40
"""Characters of a folder's name; Kubernetes allows its Jobs 63, with what is added."""
_DIGITS = 8
_FOLDER = re.compile(rf"[a-z0-9]([a-z0-9-]{{0,{_LONGEST - 2}}}[a-z0-9])?")


LoggerName = Literal["console", "tensorboard", "file", "wandb", "mlflow", "swanlab", "trackio"]
"""The names of verl's loggers that are built; pipeline/report/trackers has them."""


class Trainer(Section):
    """The run."""

    experiment_name: str = Field(
        min_length=1,
        max_length=200,
        description="Name of the run. The same name again attaches to the run. Its folder has this "
        "name; one with other characters than small letters, digits and hyphens, or of more than "
        "40, is shortened, and a digest of it is appended.",
    )
    total_training_steps: int = Field(
        10,
        ge=1,
        json_schema_extra=FOR_WORKERS,
        description="Steps of the run; where it is not written, they follow from total_epochs.",
    )
    total_epochs: int | None = Field(
        None,
        ge=1,
        json_schema_extra=OPERATIONAL | formerly(None),
        description="Passes over the training prompts, of whole batches as in verl: "
        "total_training_steps = floor(prompts / data.train_batch_size) * total_epochs.",
    )
    nnodes: int = Field(1, ge=1, description="Training nodes.")
    n_gpus_per_node: int = Field(1, ge=1, description="Training ranks per node (also on CPU).")
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto",
        json_schema_extra=FOR_WORKERS | formerly("auto"),
        description="Of training ranks and engines. auto: the GPUs where there are any, else the "
        "CPU; GPUs that cannot be used are an error.",
    )
    save_freq: int = Field(
        10, ge=1, json_schema_extra=FOR_WORKERS, description="Steps between checkpoints."
    )
    test_freq: int = Field(
        -1,
        ge=-1,
        json_schema_extra=OPERATIONAL,
        description="Steps between validations; -1 or 0: none but before and after the run.",
    )
    val_before_train: bool = Field(
        True, json_schema_extra=OPERATIONAL, description="Validate policy 0."
    )
    project_name: str = Field(
        "retrace",
        min_length=1,
        max_length=200,
        json_schema_extra=OPERATIONAL | formerly("retrace"),
        description="The project under which trackers show the run (MLflow calls it experiment).",
    )
    logger: list[LoggerName] = Field(
        ["console"],
        json_schema_extra=OPERATIONAL,
        description="Where metrics go: the screen, files (file: JSON lines; tensorboard) under "
        "default_local_dir, trackers (docs/metrics.md). A tracker that fails ends no run.",
    )
    default_local_dir: str = Field(
        "outputs",
        json_schema_extra=OPERATIONAL,
        description="Folder for logs and TensorBoard files: <this>/<experiment_name>/...",
    )
    critic_warmup: int = Field(
        0,
        ge=0,
        json_schema_extra=formerly(0),
        description="PPO: in so many steps, the run's first, only the critic is trained. (In verl "
        "in one step less, as it counts steps from 1.)",
    )
    seed: int = Field(
        1,
        ge=0,
        description="Seed of sampling, of the layout's shuffle and of the critic's value head.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=1,
        description="How many policy versions a step's rollouts may lag; 1 overlaps rollout and "
        "training.",
    )

    @property
    def run_name(self) -> str:
        """The name of the run's folder, and of all else that is called after the run."""
        return folder_name(self.experiment_name)


def folder_name(experiment_name: str) -> str:
    """The name of a run's folder: small letters, digits and hyphens, at most 40.

    A name that is none by itself ends with a digest of what was written, so that `Test_1` and
    `test.1` are two runs.
    """
    if _FOLDER.fullmatch(experiment_name):
        return experiment_name
    digest = hashlib.sha256(experiment_name.encode()).hexdigest()[:_DIGITS]
    readable = re.sub(r"[^a-z0-9]+", "-", experiment_name.lower()).strip("-")
    return f"{readable[: _LONGEST - _DIGITS - 1].rstrip('-') or 'run'}-{digest}"
