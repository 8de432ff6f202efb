"""The trackers, each a small class, by their names in `trainer.logger`. All names are verl's.

A class is made in a process of its own, and only when a run asks for it, so libraries are imported
there. To add one: a class and its row in TRACKERS, its name in `trainer.logger`
(pipeline/config/trainer.py), and, for a library that is not there anyway, its extra
(pyproject.toml, pipeline/extras.py).
"""

import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.dotted import leaves

Values = Mapping[str, float]
"""What was measured, by metric."""

STEP = "training/global_step"
"""The axis of curves, under verl's name. Steps count from 0; a validation stands at its policy."""


CLOSE_S = 60
"""How long a tracker may take to write what is left when the run has ended."""


@dataclass(frozen=True)
class TrackedRun:
    """A run, for trackers. Example: TrackedRun('quickstart-1a2b3c4d', 'quickstart', ...)."""

    id: str
    """Of this run alone, also where another of the same name was removed before."""
    name: str
    project: str
    folder: str
    """Where local files may lie."""
    settings: Mapping[str, Any]
    """The run's settings, for people."""


class Tracker(ABC):
    """One place that takes metrics. Every method may raise whatever its library raises."""

    @property
    def last_step(self) -> int | None:
        """The last step that the place itself knows to have, -1: none, or only what this machine
        has written there; None: it cannot be known without the record of this machine."""
        return -1

    @abstractmethod
    def log_step(self, step: int, values: Values) -> None:
        """Take the metrics of a step."""

    @abstractmethod
    def log_validation(self, version: int, values: Values) -> None:
        """Take what the validation of a policy came to."""

    @abstractmethod
    def close(self) -> None:
        """Write what is buffered, and end."""


class File(Tracker):
    """JSON lines, as verl writes them: {"step": 3, "data": {...}}."""

    def __init__(self, run: TrackedRun) -> None:
        path = Path(run.folder, "metrics.jsonl")
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:  # killed while it wrote
            os.truncate(path, len(whole))
        self._last = max(_steps_in(whole), default=-1)
        self._file = path.open("a", encoding="utf-8")

    @property
    def last_step(self) -> int:
        """See Tracker."""
        return self._last

    def log_step(self, step: int, values: Values) -> None:
        """See Tracker."""
        self._file.write(json.dumps({"step": step, "data": values}) + "\n")
        self._file.flush()

    def log_validation(self, version: int, values: Values) -> None:
        """See Tracker."""
        self.log_step(version, values)

    def close(self) -> None:
        """See Tracker."""
        self._file.close()


def _steps_in(lines: bytes) -> Iterator[int]:
    """The steps of a file; its other lines are validations."""
    for line in lines.splitlines():
        found = json.loads(line)
        if not all(name.startswith("val") for name in found["data"]):
            yield found["step"]


class Tensorboard(Tracker):
    """TensorBoard event files in one folder per run."""

    def __init__(self, run: TrackedRun) -> None:
        # TensorBoard's own writer: torch.utils.tensorboard would need torch.
        from tensorboard.summary import Writer

        self._writer = Writer(str(Path(run.folder, "tensorboard")))

    def log_step(self, step: int, values: Values) -> None:
        """See Tracker."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_validation(self, version: int, values: Values) -> None:
        """See Tracker."""
        self.log_step(version, values)

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


class Wandb(Tracker):
    """Weights & Biases. Its own settings are its environment variables (WANDB_MODE=offline, ...).

    Its steps may only grow, but a validation ends after later steps: they are an axis here.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=run.folder,
            config=dict(run.settings),
        )
        self._run.define_metric("*", step_metric=STEP)

    @property
    def last_step(self) -> int:
        """See Tracker."""
        return int(self._run.summary.get("last_step", -1))

    def log_step(self, step: int, values: Values) -> None:
        """See Tracker."""
        self._run.log({**values, STEP: step})
        self._run.summary["last_step"] = step

    def log_validation(self, version: int, values: Values) -> None:
        """See Tracker."""
        self._run.log({**values, STEP: version})

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


_MOST_METRICS, _MOST_PARAMETERS, _LONGEST_PARAMETER, _LONGEST_NAME = 1000, 100, 500, 250
"""Limits of MLflow's API: of a request, and characters of a parameter and of a name."""


class Mlflow(Tracker):
    """MLflow, on the server of MLFLOW_TRACKING_URI, else a SQLite file beside the runs' folders.

    verl's project is MLflow's experiment.
    """

    _ID, _LAST = "retrace.run", "retrace.last_step"

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        database = Path(run.folder).absolute().parent / "mlflow.db"
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(run.project)
        where = experiment.experiment_id if experiment else None
        if where is None:
            where = self._client.create_experiment(run.project)
        found = self._client.search_runs([where], f"tags.`{self._ID}` = '{run.id}'")
        if found:
            self._of_run, self._last = found[0].info.run_id, found[0].data.tags.get(self._LAST, -1)
            self._client.update_run(self._of_run, status="RUNNING")
            return
        tags = {self._ID: run.id}
        self._of_run = self._client.create_run(where, run_name=run.name, tags=tags).info.run_id
        self._last = -1
        settings = {
            key: str(value)[:_LONGEST_PARAMETER] for key, value in leaves(dict(run.settings))
        }
        for some in _in_parts(list(settings.items()), _MOST_PARAMETERS):
            self._client.log_batch(self._of_run, params=[Param(*one) for one in some])

    @property
    def last_step(self) -> int:
        """See Tracker."""
        return int(self._last)

    def log_step(self, step: int, values: Values) -> None:
        """See Tracker."""
        self.log_validation(step, values)
        self._client.set_tag(self._of_run, self._LAST, step)

    def log_validation(self, version: int, values: Values) -> None:
        """See Tracker. Names may have fewer characters there: `@` becomes `_at_`, as in verl."""
        now_ms = int(time.time() * 1000)
        for some in _in_parts(list(values.items()), _MOST_METRICS):
            metrics = [self._metric(_allowed(n), value, now_ms, version) for n, value in some]
            self._client.log_batch(self._of_run, metrics=metrics)

    def close(self) -> None:
        """See Tracker."""
        self._client.set_terminated(self._of_run)


def _in_parts(items: list[Any], most: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _allowed(name: str) -> str:
    """A name that MLflow takes, which refuses a whole request for one other: as of a data source
    that is a URL, or empty. It must be the shortest form of a path."""
    clean = re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))
    parts = [part for part in clean.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_LONGEST_NAME].rstrip("/")


class _WithoutLastStep(Tracker):
    """A service of which no one can ask what the last step was."""

    _run: Any

    @property
    def last_step(self) -> None:
        """See Tracker."""
        return

    def log_step(self, step: int, values: Values) -> None:
        """See Tracker."""
        self._run.log(dict(values), step=step)

    def log_validation(self, version: int, values: Values) -> None:
        """See Tracker."""
        self.log_step(version, values)

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


class Swanlab(_WithoutLastStep):
    """SwanLab; SWANLAB_MODE (online, local, offline) as in verl. It resumes online runs alone."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            mode=os.environ.get("SWANLAB_MODE", "online"),
            log_dir=run.folder,
            config=dict(run.settings),
        )


class Trackio(_WithoutLastStep):
    """trackio; TRACKIO_DIR and TRACKIO_SPACE_ID say where. A run there is known by its name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=run.id,
            resume="allow",
            config=dict(run.settings),
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


@dataclass(frozen=True)
class TrackerKind:
    """A kind of tracker."""

    make: Callable[[TrackedRun], Tracker]
    extra: str = ""
    """The extra of this distribution that brings its library; empty: `flow` does."""


TRACKERS = {
    "file": TrackerKind(File),
    "tensorboard": TrackerKind(Tensorboard),
    "wandb": TrackerKind(Wandb, "wandb"),
    "mlflow": TrackerKind(Mlflow, "mlflow"),
    "swanlab": TrackerKind(Swanlab, "swanlab"),
    "trackio": TrackerKind(Trackio, "trackio"),
}
"""By name. The remaining one, console, is the flow's own screen."""
