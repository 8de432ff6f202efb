"""What people see of a run's metrics."""

import io
import logging
from pathlib import Path

from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.report.display import Display, warnings_of
from pipeline.report.loggers import TensorBoardLogger
from pipeline.report.metrics import (
    StepMetrics,
    Validation,
    all_metrics,
    read_validation,
)
from pipeline.report.tables import closing_table, step_line
from pipeline.store import keys, open_store
from pipeline.store.commit import commit

VALUES = {
    "reward/mean": 0.5,
    "mismatch/kl": 1.5e-3,
    "mismatch/kl_native": None,
    "replay/coverage": 1.0,
    "time/train_s": 12.34,
}


def text_of(*renderables: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for renderable in renderables:
        console.print(renderable)
    return console.file.getvalue()


def test_the_closing_table_fits_80_characters_and_shows_what_was_not_measured():
    steps = [StepMetrics(0, VALUES), StepMetrics(1, VALUES)]
    text = text_of(closing_table(steps, {0: 0.25, 2: 0.75}))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    first, second, end = [line.split() for line in text.splitlines() if "0." in line]
    assert first[:4] == ["0", "0.500", "1.5e-03", "—"]
    assert (first[-1], second[-1], end[-1]) == ("0.250", "12.3", "0.750")


def test_the_line_of_a_step_leaves_out_what_was_not_measured():
    line = step_line(StepMetrics(1, VALUES), 8)
    assert line.startswith("step 1 of 8")
    assert "reward 0.500" in line
    assert "native" not in line


def test_metrics_are_read_up_to_the_first_unfinished_step(tmp_path: Path):
    store = open_store(str(tmp_path))
    for step in (0, 1, 3):
        commit(store, keys.metrics(step), {"metrics": {"a": step}}, "aaaaaaaa")
    assert [(m.step, m.values) for m in all_metrics(store)] == [(0, {"a": 0}), (1, {"a": 1})]


def test_a_validation_is_known_when_all_its_shards_are(tmp_path: Path):
    store = open_store(str(tmp_path))
    assert read_validation(store, 4) is None
    commit(store, keys.validation_plan(4), {"shards": 2}, "aaaaaaaa")
    commit(store, keys.validation(4, 0), {"reward_sum": 3.0, "count": 4}, "aaaaaaaa")
    assert read_validation(store, 4) is None
    commit(store, keys.validation(4, 1), {"reward_sum": 0.0, "count": 2}, "aaaaaaaa")
    assert read_validation(store, 4) == Validation(4, 6, 0.5)


def test_a_validation_whose_samples_are_all_masked_is_not_a_missing_one(tmp_path: Path):
    store = open_store(str(tmp_path))
    commit(store, keys.validation_plan(0), {"shards": 1}, "aaaaaaaa")
    commit(store, keys.validation(0, 0), {"reward_sum": 0, "count": 0}, "aaaaaaaa")
    assert read_validation(store, 0) == Validation(0, 0, None)
    assert "—" in text_of(closing_table([StepMetrics(0, VALUES)], {0: None})).splitlines()[-2]


def test_tensorboard_files_hold_the_measured_values(tmp_path: Path):
    logger = TensorBoardLogger(tmp_path)
    logger.log(3, VALUES)
    logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["tensors"]) == {k for k, v in VALUES.items() if v is not None}
    assert events.Tensors("reward/mean")[0].step == 3


def test_outside_a_terminal_each_new_phase_is_a_line():
    console = Console(file=io.StringIO(), width=80)
    with Display(console) as display:
        display.phase("rollout", "0/2 shards")
        display.phase("rollout", "0/2 shards")
        display.phase("rollout", "1/2 shards")
        display.line("step 1/8")
    lines = console.file.getvalue().splitlines()
    assert [line.split("] ")[1] for line in lines] == [
        "rollout: 0/2 shards",
        "rollout: 1/2 shards",
        "step 1/8",
    ]
    assert lines[0].startswith("[00:0")


def test_warnings_of_the_store_are_shown_now_and_then():
    """Who waits for a server that restarts should see why, but not each try."""
    console = Console(file=io.StringIO(), width=200)
    log = logging.getLogger("pipeline.store.s3_client")
    with Display(console) as display, warnings_of("pipeline.store", display.line):
        for number in range(5):
            log.warning("try %d follows", number)
        log.info("nothing to see")
    log.warning("after the run")
    text = console.file.getvalue()
    assert "try 0 follows" in text
    assert "try 1" not in text
    assert "nothing to see" not in text
    assert "after the run" not in text
