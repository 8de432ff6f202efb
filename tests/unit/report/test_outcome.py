"""Whether anything is left to do of a run."""

import pytest

from pipeline.config.tree import RunConfig
from pipeline.report.outcome import finished_line, is_complete
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from pipeline.store import StoreError, open_store
from tests.attempts import make_attempt
from tests.memory_store import MemoryStore

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
        commit(store, keys.metrics(step), {"metrics": {}}, new_write_id())
    return store


def test_all_steps_are_needed():
    assert is_complete(config(), with_steps(STEPS))
    assert not is_complete(config(), with_steps(STEPS - 1))


@pytest.mark.parametrize("recorded", range(STEPS + 1))
def test_a_recorded_set_has_every_step(tmp_path, recorded):
    """A flow that was killed at the end of its last step had not written it."""
    place = open_store(str(tmp_path))
    for step in range(recorded):
        place.create(keys.manifest(step), b"{}")
    assert is_complete(config(str(tmp_path)), with_steps(STEPS)) == (recorded == STEPS)


def test_a_validation_that_is_missing_is_left():
    assert not is_complete(config(val_files="v.parquet"), with_steps(STEPS))


@pytest.mark.parametrize("finished", [0, STEPS - 1, STEPS])
def test_what_is_said_at_once(finished):
    """By what the last start wanted, which needs no settings."""
    store = with_steps(finished)
    make_attempt(store, 0, steps=1)
    make_attempt(store, 1, steps=STEPS)
    said = f"{store.uri}: all 3 steps are finished already"
    assert finished_line(store) == (said if finished == STEPS else None)


def test_nothing_is_said_of_what_is_no_run():
    with pytest.raises(StoreError):
        finished_line(MemoryStore())
