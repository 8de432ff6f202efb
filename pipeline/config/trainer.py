"""Settings of the run itself: its name, steps, checkpoints and ranks."""

import hashlib
import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from pipeline.config.section import FOR_WORKERS, OPERATIONAL, PLACE, Count, Section

_LONGEST = 40
"""Maximum length of a folder's name, in characters.

A Job's name contains the folder's name and more text; Kubernetes allows at most 63 characters.
"""
_DIGITS = 8
_FOLDER = re.compile(rf"[a-z0-9]([a-z0-9-]{{0,{_LONGEST - 2}}}[a-z0-9])?")


LoggerName = Literal["console", "tensorboard", "file", "wandb", "mlflow", "swanlab", "trackio"]
"""The names of verl's loggers that pipeline/report/trackers implements."""


class Trainer(Section):
    """The run: name, length, checkpoints, validation, metrics and training ranks."""

    experiment_name: str = Field(
        min_length=1,
        max_length=200,
        description="Name of the run. If a run with this name exists, you attach to it instead of "
        "starting a new run. If the name consists of at most 40 lower-case letters, digits and "
        "hyphens, it is also the name of the run's folder. Any other name is shortened for the "
        "folder and gets a digest as its suffix.",
    )
    total_training_steps: Annotated[Count, FOR_WORKERS] = Field(
        10,
        description="Number of steps in the run; if only total_epochs is set, this number "
        "is computed from it.",
    )
    total_epochs: Annotated[Count | None, OPERATIONAL] = Field(
        None,
        description="Number of passes over the training prompts. As in verl, only full batches "
        "count: total_training_steps = floor(prompts / data.train_batch_size) * total_epochs.",
    )
    nnodes: Count = Field(1, description="Number of training nodes.")
    n_gpus_per_node: Count = Field(1, description="Training ranks per node (also on CPU).")
    device: Annotated[Literal["auto", "cuda", "cpu"], FOR_WORKERS] = Field(
        "auto",
        description="Device of training ranks and engines. auto: the GPUs if there are any, "
        "otherwise the CPU. If there are GPUs that cannot be used, the run ends with an error.",
    )
    save_freq: Annotated[Count, FOR_WORKERS] = Field(
        10, description="Number of steps between checkpoints."
    )
    test_freq: Annotated[int, OPERATIONAL] = Field(
        -1,
        ge=-1,
        description="Number of steps between validations; -1 or 0: validate only before and after "
        "the run.",
    )
    val_before_train: Annotated[bool, OPERATIONAL] = Field(
        True, description="Validate policy 0 before training begins."
    )
    project_name: Annotated[str, OPERATIONAL] = Field(
        "retrace",
        min_length=1,
        max_length=200,
        description="Project under which trackers show the run (MLflow calls it an experiment).",
    )
    logger: Annotated[list[LoggerName], OPERATIONAL] = Field(
        ["console"],
        description="Where metrics are written: the screen (console), files under "
        "default_local_dir (file: JSON lines; tensorboard) or trackers (docs/metrics.md). A "
        "tracker's failure does not end the run.",
    )
    default_local_dir: Annotated[str, PLACE, OPERATIONAL] = Field(
        "outputs",
        description="Folder for logs and TensorBoard files. A run's files are in the subfolder "
        "named after its experiment_name.",
    )
    critic_warmup: NonNegativeInt = Field(
        0,
        description="PPO: number of steps at the start of the run that train only the critic. "
        "In verl, which counts steps from 1, this phase is one step shorter.",
    )
    seed: NonNegativeInt = Field(
        1,
        description="Seed for sampling, for the random assignment of samples to mini-batches and "
        "ranks, and for the critic's value head.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=1,
        description="Number of policy versions by which samples may lag behind the policy being "
        "trained; 1 allows rollout and training to overlap.",
    )

    @property
    def run_name(self) -> str:
        """The name of the run's folder; the names of the run's Kubernetes objects contain it."""
        return folder_name(self.experiment_name)


def folder_name(experiment_name: str) -> str:
    """Return the name of a run's folder: at most 40 lower-case letters, digits and hyphens.

    An experiment name that does not have this form is shortened, and a digest of the full name is
    appended. `Test_1` and `test.1` are therefore two different runs.
    """
    if _FOLDER.fullmatch(experiment_name):
        return experiment_name
    digest = hashlib.sha256(experiment_name.encode()).hexdigest()[:_DIGITS]
    readable = re.sub(r"[^a-z0-9]+", "-", experiment_name.lower()).strip("-")
    return f"{readable[: _LONGEST - _DIGITS - 1].rstrip('-') or 'run'}-{digest}"
