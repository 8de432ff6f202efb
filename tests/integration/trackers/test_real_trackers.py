"""Trackers with the real libraries: wandb offline, MLflow with SQLite or a server that hangs."""

import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from wandb.proto import wandb_internal_pb2

from pipeline.report.trackers.kinds import STEP
from tests.patience import PATIENCE_S
from tests.unit.report.test_trackers import MEASURED, close, start
from tests.unit.report.values import VALUES

pytestmark = pytest.mark.integration

CORE = "val-core/openai/gsm8k/acc/mean@4"


def two_starts(name: str, folder: Path) -> list[str]:
    """Track two starts of a run; the first is killed before it tracks step 1 and validation 2.

    Returns all lines shown to users.
    """
    lines: list[str] = []
    first = start(name, folder, lines)
    first.log("step", 0, VALUES)
    first.log("validation", 1, {CORE: 0.25})
    close(first)
    second = start(name, folder, lines)
    second.log("step", 0, VALUES, again=True)
    second.log("step", 1, VALUES, again=True)
    for version in (1, 2):
        second.log("validation", version, {CORE: 0.25}, again=True)
    second.log("step", 2, VALUES)
    close(second)
    assert (first.taken, second.taken) == (2, 5), lines
    return lines


def records(file: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file.

    The file begins with 7 bytes that wandb adds. A log in LevelDB's format follows, in blocks of
    32 KiB. Each part of a record has a checksum, a length and its place in the record (all, first,
    middle, last).
    """
    place, record = 7, b""
    while place < len(file):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", file, place)
        record += file[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def history(folder: Path) -> list[dict[str, float]]:
    """Return the rows of all of wandb's offline runs, in the order in which the runs started."""
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                rows.append({k: v for k, v in found.items() if not k.startswith("_")})
    return rows


def test_wandb_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert two_starts("wandb", tmp_path) == []
    assert history(tmp_path) == [
        {**MEASURED, STEP: 0},
        {CORE: 0.25, STEP: 1},
        {**MEASURED, STEP: 1},
        {CORE: 0.25, STEP: 2},
        {**MEASURED, STEP: 2},
    ]
    # Starts within one second would share a folder name, so wandb appends a number to it.
    runs = [path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb")]
    assert runs == ["run-test-1a2b3c4d.wandb"] * 2, "the run id has changed"


def test_mlflow_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert two_starts("mlflow", tmp_path / "test") == []
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("retrace")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "test"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"trainer.seed": "1"}
    for name, value in MEASURED.items():
        found = client.get_metric_history(run.info.run_id, name)
        assert [(one.step, one.value) for one in found] == [(step, value) for step in range(3)]
    found = client.get_metric_history(run.info.run_id, CORE.replace("@", "_at_"))
    assert [(one.step, one.value) for one in found] == [(1, 0.25), (2, 0.25)]


@pytest.mark.parametrize(
    ("source", "stored"),
    [
        ("https://example.com/set", "https:/example.com/set"),
        ("", None),
        ("../up", "up"),
        ("größe 100%", "größe 100_"),
        ("long" * 99, "long" * 58 + "lon"),
    ],
)
def test_names_that_mlflow_does_not_accept_are_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, stored: str | None
):
    """Names from data sources and reward functions are changed; otherwise MLflow refuses a step."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    lines: list[str] = []
    tracker = start("mlflow", tmp_path / "test", lines)
    tracker.log("step", 0, {"reward/groups": 2.0, f"critic/rewards/{source}/mean": 0.5})
    close(tracker)
    assert (tracker.taken, lines) == (1, [])
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("retrace").experiment_id])
    name = "critic/rewards/mean" if stored is None else f"critic/rewards/{stored}"
    name = name if stored is None or len(name) == 250 else f"{name}/mean"
    assert run.data.metrics == {"reward/groups": 2.0, name: 0.5}


def test_a_password_in_a_servers_address_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@{place}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    lines: list[str] = []
    tracker = start("mlflow", tmp_path, lines)
    tracker.log("step", 0, VALUES)
    close(tracker)
    assert tracker.failures == 1
    assert all(f"http://***@{place}" in line for line in lines), lines
    assert "secret" not in str(lines)


def test_a_server_that_never_answers_does_not_delay_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        lines: list[str] = []
        tracker = start("mlflow", tmp_path, lines)
        tracker.log("step", 0, VALUES)
        server.settimeout(PATIENCE_S)
        connection, _ = server.accept()  # MLflow sends a request and waits
        with connection:
            tracker.end()
            tracker.close(time.monotonic() + 0.5)
    [line] = lines
    assert line.startswith("mlflow lacks 1 of 1 steps and validations (it did not end in time; ")
