"""The trackers, keyed by their names in `trainer.logger`. The names are verl's.

Each tracker is opened in a separate process, and only if the run's settings select it. Its library
is imported only in that process. To add a tracker, write a function that opens it, add the function
to TRACKERS, and add the name to `trainer.logger` (pipeline/config/trainer.py). If its library is
not a dependency yet, also add an extra (pyproject.toml, pipeline/extras.py).
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pipeline.config.dotted import leaves

Values = Mapping[str, float]
"""Measured values, keyed by metric."""

Kind = Literal["step", "validation"]
"""What values belong to: a step, or a policy version that was validated."""

KINDS: tuple[Kind, ...] = get_args(Kind)

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
class Tracker:
    """An opened destination of metrics. Its functions may raise any error of its library."""

    log: Callable[[Kind, int, Values], object]
    """Records the metrics of a step, or the validation results of a policy version."""
    close: Callable[[], object]
    """Writes buffered values and closes the tracker."""
    last: Mapping[Kind, int | None]
    """The last number of each kind that the tracker itself has recorded.

    It is -1 if there is none, or if the tracker relies on this machine's record of what it
    received. It is None if the tracker cannot report it.
    """


_IN_RECORD: dict[Kind, int | None] = dict.fromkeys(KINDS, -1)
_NOT_REPORTED: dict[Kind, int | None] = dict.fromkeys(KINDS, None)


def _file(run: TrackedRun) -> Tracker:
    """Open a JSON Lines file in verl's format: {"step": 3, "data": {...}}."""
    path = Path(run.folder, "metrics.jsonl")
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole != len(content):  # a killed process did not complete the last line
        os.truncate(path, whole)
    file = path.open("a", encoding="utf-8", buffering=1)  # written line by line

    def log(_: Kind, number: int, values: Values) -> None:
        file.write(json.dumps({"step": number, "data": values}) + "\n")

    return Tracker(log, file.close, _IN_RECORD)


def _tensorboard(run: TrackedRun) -> Tracker:
    """Open TensorBoard event files in one folder per run."""
    # TensorBoard's own writer, because torch.utils.tensorboard requires torch.
    from tensorboard.summary import Writer

    writer = Writer(str(Path(run.folder, "tensorboard")))

    def log(_: Kind, number: int, values: Values) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, number)
        writer.flush()

    return Tracker(log, writer.close, _IN_RECORD)


def _wandb(run: TrackedRun) -> Tracker:
    """Open Weights & Biases, configured by environment variables (WANDB_MODE=offline, ...).

    wandb's own step may only increase, but a validation may end after later steps. The step is
    therefore recorded as a metric, and that metric is the axis of all curves.
    """
    import wandb

    opened = wandb.init(
        project=run.project,
        name=run.name,
        id=run.id,
        resume="allow",
        dir=run.folder,
        config=dict(run.settings),
    )
    opened.define_metric("*", step_metric=STEP)

    def log(kind: Kind, number: int, values: Values) -> None:
        opened.log({**values, STEP: number})
        opened.summary[f"last_{kind}"] = number

    last = {kind: int(opened.summary.get(f"last_{kind}", -1)) for kind in KINDS}
    return Tracker(log, opened.finish, last)


def _swanlab(run: TrackedRun) -> Tracker:
    """Open SwanLab, configured by SWANLAB_MODE as in verl; only online runs can be resumed."""
    import swanlab

    opened = swanlab.init(
        project=run.project,
        name=run.name,
        id=run.id,
        resume="allow",
        mode=os.environ.get("SWANLAB_MODE", "online"),
        log_dir=run.folder,
        config=dict(run.settings),
    )
    return _by_steps(opened)


def _trackio(run: TrackedRun) -> Tracker:
    """Open trackio, configured by TRACKIO_DIR and TRACKIO_SPACE_ID.

    trackio identifies runs by name, so the run's id is used as its name.
    """
    import trackio

    opened = trackio.init(
        project=run.project,
        name=run.id,
        resume="allow",
        config=dict(run.settings),
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return _by_steps(opened)


def _by_steps(opened: Any) -> Tracker:
    """Return the tracker of a library's run, whose `log` takes values and a step."""

    def log(_: Kind, number: int, values: Values) -> None:
        opened.log(dict(values), step=number)

    return Tracker(log, opened.finish, _NOT_REPORTED)


_LONGEST_PARAMETER, _LONGEST_NAME = 500, 250
"""Limits of MLflow's API: characters in a parameter's value, and in a metric's name."""


def _mlflow(run: TrackedRun) -> Tracker:
    """Open MLflow, on the server at MLFLOW_TRACKING_URI or in a SQLite file next to the runs.

    As in verl, the project is MLflow's experiment. A tag holds the last step and version.
    Characters that MLflow refuses in names are replaced; `@` becomes `_at_`, as in verl.
    """
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    database = Path(run.folder).absolute().parent / "mlflow.db"
    uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(run.project)
    experiment = found.experiment_id if found else client.create_experiment(run.project)
    tags: Mapping[str, str] = {"retrace.run": run.id}
    stored = client.search_runs([experiment], f"tags.`retrace.run` = '{run.id}'")
    if stored:
        to, tags = stored[0].info.run_id, stored[0].data.tags
        client.update_run(to, status="RUNNING")
    else:
        to = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        settings = leaves(dict(run.settings))
        params = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in settings]
        client.log_batch(to, params=params)

    def log(kind: Kind, number: int, values: Values) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [Metric(_allowed(name), value, now_ms, number) for name, value in values.items()]
        client.log_batch(to, metrics=metrics)
        client.set_tag(to, f"retrace.last_{kind}", number)

    last = {kind: int(tags.get(f"retrace.last_{kind}", -1)) for kind in KINDS}
    return Tracker(log, lambda: client.set_terminated(to), last)


def _allowed(name: str) -> str:
    """Return a metric's name in a form that MLflow accepts.

    A single invalid name makes MLflow refuse the entire request. For example, a name is invalid if
    its data source is a URL or empty. A valid name is a path in its shortest form.
    """
    clean = re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))
    parts = [part for part in clean.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_LONGEST_NAME].rstrip("/")


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "file": _file,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "trackio": _trackio,
}
"""The functions that open a tracker, keyed by its name.

`trainer.logger` also accepts console, which is the screen. A tracker whose library the extra `flow`
does not install has an extra of its own name (pipeline/extras.py).
"""
