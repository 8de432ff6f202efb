"""The trackers, each a small class, keyed by their names in `trainer.logger`. The names are verl's.

Each tracker is created in a separate process, and only if the run's settings select it. The
tracker's library is imported only in that process. To add a tracker, write a class, add it to
TRACKERS, and add its name to `trainer.logger` (pipeline/config/trainer.py). If its library is not a
dependency yet, also add an extra (pyproject.toml, pipeline/extras.py).
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
"""Measured values, keyed by metric."""

STEP = "training/global_step"
"""The x-axis of curves, under verl's name. Steps are counted from 0; a validation is placed at its
policy version."""


CLOSE_S = 60
"""Seconds that a tracker has for its remaining messages after the end of the run."""


@dataclass(frozen=True)
class TrackedRun:
    """A run's description for trackers.

    Example: TrackedRun('quickstart-1a2b3c4d', 'quickstart', ...).
    """

    id: str
    """Unique id. A later run that reuses the name of a removed run has a different id."""
    name: str
    project: str
    folder: str
    """The folder for local files."""
    settings: Mapping[str, Any]
    """The run's settings, for display."""


class Tracker(ABC):
    """A destination of metrics. Every method may raise any error of its library."""

    @property
    def last_step(self) -> int | None:
        """The last step that the tracker itself has recorded.

        The value is -1 if the tracker has no step, or if it relies on this machine's record of the
        steps that it received. A tracker that cannot report its last step returns None.
        """
        return -1

    @property
    def last_validation(self) -> int | None:
        """The last policy version whose validation the tracker has recorded; see `last_step`."""
        return -1

    @abstractmethod
    def log_step(self, step: int, values: Values) -> None:
        """Record the metrics of a step."""

    @abstractmethod
    def log_validation(self, version: int, values: Values) -> None:
        """Record the validation results of a policy version."""

    @abstractmethod
    def close(self) -> None:
        """Write buffered values and close the tracker."""


class File(Tracker):
    """A JSON Lines file in verl's format: {"step": 3, "data": {...}}."""

    def __init__(self, run: TrackedRun) -> None:
        path = Path(run.folder, "metrics.jsonl")
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:  # a killed process did not complete the last line
            os.truncate(path, len(whole))
        lines = [json.loads(line) for line in whole.splitlines()]
        self._last_step, self._last_validation = (
            max((line["step"] for line in lines if _is_validation(line) == is_one), default=-1)
            for is_one in (False, True)
        )
        self._file = path.open("a", encoding="utf-8")

    @property
    def last_step(self) -> int:
        """See Tracker."""
        return self._last_step

    @property
    def last_validation(self) -> int:
        """See Tracker."""
        return self._last_validation

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


def _is_validation(line: Mapping[str, Any]) -> bool:
    return all(name.startswith("val") for name in line["data"])


class Tensorboard(Tracker):
    """TensorBoard event files in one folder per run."""

    def __init__(self, run: TrackedRun) -> None:
        # TensorBoard's own writer, because torch.utils.tensorboard requires torch.
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
    """Weights & Biases, configured by environment variables (WANDB_MODE=offline, ...).

    wandb's own step may only increase, but a validation may end after later steps. This class
    therefore records the step as a metric, and uses that metric as the axis of all curves.
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

    @property
    def last_validation(self) -> int:
        """See Tracker."""
        return int(self._run.summary.get("last_validation", -1))

    def log_step(self, step: int, values: Values) -> None:
        """See Tracker."""
        self._run.log({**values, STEP: step})
        self._run.summary["last_step"] = step

    def log_validation(self, version: int, values: Values) -> None:
        """See Tracker."""
        self._run.log({**values, STEP: version})
        self._run.summary["last_validation"] = version

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


_MOST_METRICS, _MOST_PARAMETERS, _LONGEST_PARAMETER, _LONGEST_NAME = 1000, 100, 500, 250
"""Limits of MLflow's API: metrics per request, parameters per request, characters in a parameter's
value, and characters in a metric's name."""


class Mlflow(Tracker):
    """MLflow, on the server at MLFLOW_TRACKING_URI or in a SQLite file next to the runs' folders.

    As in verl, the project is MLflow's experiment.
    """

    _ID = "retrace.run"
    _LAST_STEP, _LAST_VALIDATION = "retrace.last_step", "retrace.last_validation"

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
            self._of_run, self._tags = found[0].info.run_id, found[0].data.tags
            self._client.update_run(self._of_run, status="RUNNING")
            return
        tags = {self._ID: run.id}
        self._of_run = self._client.create_run(where, run_name=run.name, tags=tags).info.run_id
        self._tags = {}
        settings = {
            key: str(value)[:_LONGEST_PARAMETER] for key, value in leaves(dict(run.settings))
        }
        for some in _in_parts(list(settings.items()), _MOST_PARAMETERS):
            self._client.log_batch(self._of_run, params=[Param(*one) for one in some])

    @property
    def last_step(self) -> int:
        """See Tracker."""
        return int(self._tags.get(self._LAST_STEP, -1))

    @property
    def last_validation(self) -> int:
        """See Tracker."""
        return int(self._tags.get(self._LAST_VALIDATION, -1))

    def log_step(self, step: int, values: Values) -> None:
        """See Tracker."""
        self._log(step, values, self._LAST_STEP)

    def log_validation(self, version: int, values: Values) -> None:
        """See Tracker."""
        self._log(version, values, self._LAST_VALIDATION)

    def _log(self, number: int, values: Values, tag: str) -> None:
        """Record values and, in a tag, their step or version.

        Characters that MLflow refuses are replaced; `@` becomes `_at_`, as in verl.
        """
        now_ms = int(time.time() * 1000)
        for some in _in_parts(list(values.items()), _MOST_METRICS):
            metrics = [self._metric(_allowed(n), value, now_ms, number) for n, value in some]
            self._client.log_batch(self._of_run, metrics=metrics)
        self._client.set_tag(self._of_run, tag, number)

    def close(self) -> None:
        """See Tracker."""
        self._client.set_terminated(self._of_run)


def _in_parts(items: list[Any], most: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _allowed(name: str) -> str:
    """Return a metric's name in a form that MLflow accepts.

    A single invalid name makes MLflow refuse the entire request. For example, a name is invalid if
    its data source is a URL or empty. A valid name is a path in its shortest form.
    """
    clean = re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))
    parts = [part for part in clean.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_LONGEST_NAME].rstrip("/")


class _WithoutRecord(Tracker):
    """A service that does not report its last step and validation."""

    _run: Any

    @property
    def last_step(self) -> None:
        """See Tracker."""
        return

    @property
    def last_validation(self) -> None:
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


class Swanlab(_WithoutRecord):
    """SwanLab, configured by SWANLAB_MODE as in verl; only online runs can be resumed."""

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


class Trackio(_WithoutRecord):
    """trackio, configured by TRACKIO_DIR and TRACKIO_SPACE_ID.

    trackio identifies runs by name, so the run's id is used as its name.
    """

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
    """The extra of this distribution that installs the library; empty if the extra `flow` does."""


TRACKERS = {
    "file": TrackerKind(File),
    "tensorboard": TrackerKind(Tensorboard),
    "wandb": TrackerKind(Wandb, "wandb"),
    "mlflow": TrackerKind(Mlflow, "mlflow"),
    "swanlab": TrackerKind(Swanlab, "swanlab"),
    "trackio": TrackerKind(Trackio, "trackio"),
}
"""The trackers, keyed by name. `trainer.logger` also accepts console, which is the screen."""
