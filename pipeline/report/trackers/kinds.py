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
from typing import Any, Literal

from pipeline.config.dotted import leaves

Values = Mapping[str, float]
"""Measured values, keyed by metric."""

Kind = Literal["step", "validation"]
"""What values belong to: a step, or a policy version that was validated."""

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


@dataclass(frozen=True)
class Entry:
    """What a tracker records at once. Example: Entry('step', 3, {'critic/rewards/mean': 0.4})."""

    kind: Kind
    number: int
    """The step or the policy version."""
    values: Values


class Tracker(ABC):
    """A destination of metrics. Every method may raise any error of its library."""

    def last(self, kind: Kind) -> int | None:
        """Return the last number of this kind that the tracker itself has recorded.

        The result is -1 if the tracker has none, or if it relies on this machine's record of what
        it received. A tracker that cannot report its last number returns None.
        """
        return -1

    @abstractmethod
    def log(self, entry: Entry) -> None:
        """Record the metrics of a step, or the validation results of a policy version."""

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
        self._last: dict[Kind, int] = {}
        for line in map(json.loads, whole.splitlines()):
            kind: Kind = "validation" if all(n[:3] == "val" for n in line["data"]) else "step"
            self._last[kind] = max(line["step"], self.last(kind))
        self._file = path.open("a", encoding="utf-8")

    def last(self, kind: Kind) -> int:
        """See Tracker."""
        return self._last.get(kind, -1)

    def log(self, entry: Entry) -> None:
        """See Tracker."""
        self._file.write(json.dumps({"step": entry.number, "data": entry.values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """See Tracker."""
        self._file.close()


class Tensorboard(Tracker):
    """TensorBoard event files in one folder per run."""

    def __init__(self, run: TrackedRun) -> None:
        # TensorBoard's own writer, because torch.utils.tensorboard requires torch.
        from tensorboard.summary import Writer

        self._writer = Writer(str(Path(run.folder, "tensorboard")))

    def log(self, entry: Entry) -> None:
        """See Tracker."""
        for name, value in entry.values.items():
            self._writer.add_scalar(name, value, entry.number)
        self._writer.flush()

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


class _Service(Tracker):
    """A service whose library returns a run with the methods `log` and `finish`."""

    _run: Any

    def last(self, kind: Kind) -> int | None:
        """See Tracker. Most services do not report what they have recorded."""
        return None

    def log(self, entry: Entry) -> None:
        """See Tracker."""
        self._run.log(dict(entry.values), step=entry.number)

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


class Wandb(_Service):
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

    def last(self, kind: Kind) -> int:
        """See Tracker."""
        return int(self._run.summary.get(f"last_{kind}", -1))

    def log(self, entry: Entry) -> None:
        """See Tracker."""
        self._run.log({**entry.values, STEP: entry.number})
        self._run.summary[f"last_{entry.kind}"] = entry.number


class Swanlab(_Service):
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


class Trackio(_Service):
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


_MOST_METRICS, _MOST_PARAMETERS, _LONGEST_PARAMETER, _LONGEST_NAME = 1000, 100, 500, 250
"""Limits of MLflow's API: metrics per request, parameters per request, characters in a parameter's
value, and characters in a metric's name."""


class Mlflow(Tracker):
    """MLflow, on the server at MLFLOW_TRACKING_URI or in a SQLite file next to the runs' folders.

    As in verl, the project is MLflow's experiment.
    """

    _ID = "retrace.run"

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
        settings = [
            Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in leaves(dict(run.settings))
        ]
        for some in _in_parts(settings, _MOST_PARAMETERS):
            self._client.log_batch(self._of_run, params=some)

    def last(self, kind: Kind) -> int:
        """See Tracker."""
        return int(self._tags.get(f"retrace.last_{kind}", -1))

    def log(self, entry: Entry) -> None:
        """Record values and, in a tag, their step or version.

        Characters that MLflow refuses are replaced; `@` becomes `_at_`, as in verl.
        """
        now_ms = int(time.time() * 1000)
        metrics = [
            self._metric(_allowed(name), value, now_ms, entry.number)
            for name, value in entry.values.items()
        ]
        for some in _in_parts(metrics, _MOST_METRICS):
            self._client.log_batch(self._of_run, metrics=some)
        self._client.set_tag(self._of_run, f"retrace.last_{entry.kind}", entry.number)

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
