"""The check of whether a run is complete."""

import pytest

from pipeline.config.tree import RunConfig
from pipeline.recorded import write_recorded_set
from pipeline.report.outcome import finished_line, is_complete
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from pipeline.store import StoreError, open_store
from tests.attempts import make_attempt
from tests.memory_store import MemoryStore
from tests.stored_runs import write_step

STEPS = 3


def config(record_file: str | None = None, val_files: str | None = None) -> RunConfig:
    replay = {"mode": "R2", "record_file": record_file}
    return RunConfig.model_validate(
        {
            "data": {"train_files": "t.parquet", "val_files": val_files},
            "actor_rollout_ref": {"model": {"path": "m"}, "actor": {"router_replay": replay}},
            "trainer": {"experiment_name": "test", "total_training_steps": STEPS},
        }
    )


def with_steps(count: int) -> MemoryStore:
    store = MemoryStore()
    for step in range(count):
        commit(store, keys.metrics(step), {"step": step, "metrics": {}}, new_write_id())
    return store


def test_a_complete_run_has_all_steps():
    assert is_complete(config(), with_steps(STEPS))
    assert not is_complete(config(), with_steps(STEPS - 1))


@pytest.mark.parametrize("recorded", range(STEPS + 1))
def test_a_complete_run_has_every_step_in_its_recorded_set(tmp_path, recorded):
    """A flow that is killed at the end of a step may not have written the step to the set."""
    run, place = with_steps(0), open_store(str(tmp_path))
    for step in range(STEPS):
        write_step(run, step)
        if step < recorded:
            write_recorded_set(run, place, step)
    assert is_complete(config(str(tmp_path)), run) == (recorded == STEPS)


def test_a_run_without_a_planned_validation_is_incomplete():
    assert not is_complete(config(val_files="v.parquet"), with_steps(STEPS))


@pytest.mark.parametrize("finished", [0, STEPS - 1, STEPS])
def test_finished_line_compares_steps_with_the_last_attempt(finished):
    """The number of steps comes from the last attempt, so the line does not depend on settings."""
    store = with_steps(finished)
    make_attempt(store, 0, steps=1)
    make_attempt(store, 1, steps=STEPS)
    line = f"{store.uri}: all 3 steps are already finished"
    assert finished_line(store) == (line if finished == STEPS else None)


def test_finished_line_refuses_a_store_without_a_run():
    with pytest.raises(StoreError):
        finished_line(MemoryStore())
