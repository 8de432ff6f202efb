"""Trackers: what arrives, what is not sent twice, and that none ends a run or holds it up."""

import json
import os
import signal
import time
from pathlib import Path
from typing import get_args

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline import extras
from pipeline.config.trainer import LoggerName
from pipeline.report.trackers.kinds import TRACKERS, TrackedRun
from pipeline.report.trackers.processes import TrackerProcess
from tests.patience import PATIENCE_S
from tests.unit.report.values import VALUES

MEASURED = {name: value for name, value in VALUES.items() if value is not None}


def start(name: str, folder: Path, lines: list[str], id: str = "test-1a2b3c4d") -> TrackerProcess:
    run = TrackedRun(id, "test", "retrace", str(folder), {"trainer": {"seed": 1}})
    return TrackerProcess(name, run, lines.append)


def close(tracker: TrackerProcess) -> None:
    tracker.end()
    tracker.close(time.monotonic() + PATIENCE_S)


def written(folder: Path) -> list[tuple[int, dict[str, float]]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["data"]) for line in map(json.loads, lines)]


def test_a_file_has_a_line_for_each_step_and_validation(tmp_path: Path):
    lines: list[str] = []
    tracker = start("file", tmp_path, lines)
    tracker.log_step(0, VALUES)
    tracker.log_validation(1, {"val/reward/mean": 0.5, "val/nothing": None})
    close(tracker)
    assert written(tmp_path) == [(0, MEASURED), (1, {"val/reward/mean": 0.5})]
    assert (tracker.taken, tracker.failures, lines) == (2, 0, [])


@pytest.mark.parametrize("name", ["file", "tensorboard"])
def test_the_next_start_sends_what_had_not_arrived_and_nothing_twice(tmp_path: Path, name: str):
    """A flow that is killed leaves a step that no tracker has seen; its next start sends the newest
    steps once more."""
    first = start(name, tmp_path, [])
    first.log_step(0, VALUES)
    first.log_step(1, VALUES)
    first.log_validation(3, {"val/reward/mean": 0.5})
    close(first)
    second = start(name, tmp_path, [])
    for step in range(3):
        second.log_step(step, VALUES, again=True)
    second.log_step(3, VALUES)
    close(second)
    assert second.taken == 4
    if name == "file":
        steps = [step for step, data in written(tmp_path) if data == MEASURED]
    else:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        steps = [event.step for event in events.Tensors("critic/rewards/mean")]
        assert {*events.Tags()["tensors"]} == {*MEASURED, "val/reward/mean"}
    assert steps == [0, 1, 2, 3]


def test_the_steps_of_a_removed_run_of_the_same_name_do_not_count(tmp_path: Path):
    for id in ("test-11111111", "test-22222222"):
        tracker = start("tensorboard", tmp_path, [], id)
        tracker.log_step(0, VALUES, again=True)
        close(tracker)
    record = json.loads((tmp_path / "trackers/tensorboard.json").read_text())
    assert record == {"run": "test-22222222", "last_step": 0}


def test_a_line_that_a_kill_cut_short_is_written_anew(tmp_path: Path):
    tracker = start("file", tmp_path, [])
    tracker.log_step(0, VALUES)
    close(tracker)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "da')
    tracker = start("file", tmp_path, [])
    tracker.log_step(1, VALUES, again=True)
    close(tracker)
    assert [step for step, _ in written(tmp_path)] == [0, 1]


def test_failures_are_counted_and_said_once(tmp_path: Path):
    (tmp_path / "metrics.jsonl").mkdir()
    lines: list[str] = []
    tracker = start("file", tmp_path, lines)
    for step in range(3):
        tracker.log_step(step, VALUES)
    close(tracker)
    assert (tracker.taken, tracker.failures) == (0, 3)
    first, last = lines
    assert first.startswith(
        "file did not take a step's metrics, the run goes on: IsADirectoryError"
    )
    assert last.startswith("file lacks 3 of 3 steps and validations (IsADirectoryError")
    (tmp_path / "metrics.jsonl").rmdir()


def test_a_tracker_recovers(tmp_path: Path):
    """Each message tries it anew."""
    (tmp_path / "metrics.jsonl").mkdir()
    lines: list[str] = []
    tracker = start("file", tmp_path, lines)
    tracker.log_step(0, VALUES)
    while tracker.failures == 0:
        time.sleep(0.01)
    (tmp_path / "metrics.jsonl").rmdir()
    tracker.log_step(1, VALUES)
    close(tracker)
    assert [step for step, _ in written(tmp_path)] == [1]
    assert lines[-1].startswith("file lacks 1 of 2 steps")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_tracker_that_dies_or_hangs_holds_nothing_up(tmp_path: Path, how: signal.Signals):
    lines: list[str] = []
    tracker = start("file", tmp_path, lines)
    tracker.log_step(0, VALUES)
    while tracker.taken == 0:
        time.sleep(0.01)
    os.kill(tracker._process.pid, how)
    for step in range(1, 5):
        tracker.log_step(step, {f"extra/{i}": 1.0 for i in range(1000)})  # more than a pipe holds
    tracker.end()
    tracker.close(time.monotonic() + 0.5)
    assert tracker._process.returncode == -signal.SIGKILL
    [line] = lines
    why = "it ended early" if how == signal.SIGKILL else "it did not end in time"
    assert line.startswith(f"file lacks 4 of 5 steps and validations ({why}; its log is ")


def test_a_tracker_writes_what_is_left_when_its_flow_is_killed(tmp_path: Path):
    """Its messages end then, as the pipe closes."""
    tracker = start("file", tmp_path, [])
    tracker.log_step(0, VALUES)
    while tracker.taken == 0:
        time.sleep(0.01)
    tracker._process.stdin.close()
    assert tracker._process.wait(PATIENCE_S) == 0


def test_names_are_those_of_the_setting_and_of_the_extras():
    assert {"console", *TRACKERS} == set(get_args(LoggerName))
    asked = {kind.extra for kind in TRACKERS.values() if kind.extra}
    assert asked <= set(extras.EXTRAS)
    assert "tensorboard" in extras.EXTRAS["flow"]
