"""Trackers receive each step once, and cannot end or delay a run."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline import extras
from pipeline.config.trainer import LoggerName
from pipeline.report.trackers import processes
from pipeline.report.trackers.kinds import TRACKERS, TrackedRun
from pipeline.report.trackers.processes import TrackerProcess
from tests.patience import PATIENCE_S, eventually
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


def record(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "trackers" / f"{name}.json").read_text())


def test_a_file_has_a_line_for_each_step_and_validation(tmp_path: Path):
    lines: list[str] = []
    tracker = start("file", tmp_path, lines)
    tracker.log("step", 0, VALUES)
    tracker.log("validation", 1, {"val/reward/mean": 0.5, "val/nothing": None})
    close(tracker)
    assert written(tmp_path) == [(0, MEASURED), (1, {"val/reward/mean": 0.5})]
    assert (tracker.taken, tracker.failures, lines) == (2, 0, [])


@pytest.mark.parametrize("name", ["file", "tensorboard"])
def test_the_next_start_adds_what_is_missing_and_repeats_nothing(tmp_path: Path, name: str):
    """A killed flow may leave a step or a validation that did not reach a tracker.

    The next start therefore sends the newest steps and validations again.
    """
    first = start(name, tmp_path, [])
    first.log("step", 0, VALUES)
    first.log("step", 1, VALUES)
    first.log("validation", 3, {"val/reward/mean": 0.5})
    close(first)
    second = start(name, tmp_path, [])
    for step in range(3):
        second.log("step", step, VALUES, again=True)
    for version in (3, 4):
        second.log("validation", version, {"val/reward/mean": 0.5}, again=True)
    second.log("step", 3, VALUES)
    close(second)
    assert second.taken == 6
    if name == "file":
        steps = [step for step, data in written(tmp_path) if data == MEASURED]
        versions = [step for step, data in written(tmp_path) if data != MEASURED]
    else:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        steps = [event.step for event in events.Tensors("critic/rewards/mean")]
        versions = [event.step for event in events.Tensors("val/reward/mean")]
        assert {*events.Tags()["tensors"]} == {*MEASURED, "val/reward/mean"}
    assert (steps, versions) == ([0, 1, 2, 3], [3, 4])


def test_steps_of_a_removed_run_with_the_same_name_are_ignored(tmp_path: Path):
    for id in ("test-11111111", "test-22222222"):
        tracker = start("tensorboard", tmp_path, [], id)
        tracker.log("step", 0, VALUES, again=True)
        close(tracker)
    found = {"run": "test-22222222", "last_step": 0, "last_validation": None, "failures": 0}
    assert record(tmp_path, "tensorboard") == found


def test_a_line_that_a_kill_cut_short_is_written_again(tmp_path: Path):
    tracker = start("file", tmp_path, [])
    tracker.log("step", 0, VALUES)
    close(tracker)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "da')
    tracker = start("file", tmp_path, [])
    tracker.log("step", 1, VALUES, again=True)
    close(tracker)
    assert [step for step, _ in written(tmp_path)] == [0, 1]


def test_failures_are_counted_and_reported_once(tmp_path: Path):
    (tmp_path / "metrics.jsonl").mkdir()
    lines: list[str] = []
    tracker = start("file", tmp_path, lines)
    for step in range(3):
        tracker.log("step", step, VALUES)
    close(tracker)
    assert (tracker.taken, tracker.failures) == (0, 3)
    first, last = lines
    assert first.startswith("file could not record metrics; the run continues: IsADirectoryError")
    assert last.startswith("file lacks 3 of 3 steps and validations (IsADirectoryError")
    assert record(tmp_path, "file")["failures"] == 3
    (tmp_path / "metrics.jsonl").rmdir()


def test_a_tracker_recovers(tmp_path: Path):
    """Until the tracker's file can be opened, each message causes another attempt to open it."""
    (tmp_path / "metrics.jsonl").mkdir()
    lines: list[str] = []
    tracker = start("file", tmp_path, lines)
    tracker.log("step", 0, VALUES)
    while tracker.failures == 0:
        time.sleep(0.01)
    (tmp_path / "metrics.jsonl").rmdir()
    tracker.log("step", 1, VALUES)
    close(tracker)
    assert [step for step, _ in written(tmp_path)] == [1]
    assert lines[-1].startswith("file lacks 1 of 2 steps")


def test_the_record_counts_the_failures_of_all_starts(tmp_path: Path):
    """After a flow is killed, the record shows that a tracker may be missing something."""
    name = "file"
    expected = {"run": "test-1a2b3c4d", "last_step": 0, "last_validation": 2}
    for start_number in range(2):
        tracker = start(name, tmp_path, [])
        tracker.log("step", 0, VALUES)
        tracker.log("validation", 2, {"val/reward/mean": 0.5}, again=True)
        tracker.log("nothing", 1, {})
        close(tracker)
        assert record(tmp_path, name) == {**expected, "failures": start_number + 1}
    other = start(name, tmp_path, [], "test-22222222")
    other.log("nothing", 1, {})
    close(other)
    assert record(tmp_path, name)["failures"] == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_tracker_that_dies_or_hangs_does_not_delay_the_run(tmp_path: Path, how: signal.Signals):
    lines: list[str] = []
    tracker = start("file", tmp_path, lines)
    tracker.log("step", 0, VALUES)
    while tracker.taken == 0:
        time.sleep(0.01)
    os.kill(tracker._process.pid, how)
    for step in range(1, 5):
        tracker.log(
            "step", step, {f"extra/{i}": 1.0 for i in range(1000)}
        )  # more than fits in a pipe
    tracker.end()
    tracker.close(time.monotonic() + 0.5)
    assert tracker._process.returncode == -signal.SIGKILL
    [line] = lines
    why = "it ended early" if how == signal.SIGKILL else "it did not end in time"
    assert line.startswith(f"file lacks 4 of 5 steps and validations ({why}; its log is ")


def test_a_tracker_that_does_not_answer_is_reported_while_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "_SILENT_S", 0.2)
    lines: list[str] = []
    tracker = start("file", tmp_path, lines)
    os.kill(tracker._process.pid, signal.SIGSTOP)
    tracker.log("step", 0, VALUES)
    said = ["file has not answered for 0.2 s; the run continues"]
    eventually(lambda: lines == said, lambda: lines)
    os.kill(tracker._process.pid, signal.SIGCONT)
    close(tracker)
    assert (tracker.taken, written(tmp_path)) == (1, [(0, MEASURED)])


def test_a_file_of_a_removed_run_with_the_same_name_hides_no_step(tmp_path: Path):
    for id in ("test-11111111", "test-22222222"):
        tracker = start("file", tmp_path, [], id)
        for step in range(2):
            tracker.log("step", step, VALUES, again=True)
        close(tracker)
    assert [step for step, _ in written(tmp_path)] == [0, 1, 0, 1]


def test_a_tracker_finishes_its_messages_when_its_flow_is_killed(tmp_path: Path):
    """When the flow is killed, its end of the pipe closes, so the tracker sees the end of the
    messages."""
    tracker = start("file", tmp_path, [])
    tracker.log("step", 0, VALUES)
    while tracker.taken == 0:
        time.sleep(0.01)
    tracker._process.stdin.close()
    assert tracker._process.wait(PATIENCE_S) == 0


def test_the_setting_lists_all_trackers_and_their_extras_exist():
    assert {"console", *TRACKERS} == set(get_args(LoggerName))
    assert {"file", "tensorboard"} == {*TRACKERS} - {*extras.EXTRAS}
    assert "tensorboard" in extras.EXTRAS["flow"]
