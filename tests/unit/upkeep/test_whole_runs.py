"""Listing the runs of a store, and removing one."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

import retrace
from pipeline.errors import InputError
from pipeline.run import keys
from pipeline.run.attempts import end_attempt
from pipeline.run.commit import commit, new_write_id
from pipeline.run.description import description_json, read_created
from pipeline.run.owner import owner_json
from pipeline.store import Store, open_store
from pipeline.store.file import FileStore
from pipeline.upkeep.remove import remove_run
from pipeline.upkeep.run_list import ListedRun, find_run
from tests.attempts import dead_owner, distant_owner, living_owner, make_attempt
from tests.memory_store import MemoryStore
from tests.samples import make_samples, sealed_r3, write_run
from tests.stored_runs import whole_run


def make_run(place: Path, steps: int) -> Store:
    """Create a run with 8 steps, `steps` of which are trained."""
    made = MemoryStore()
    write_run(made, make_samples(), "R3")
    run = replace(read_created(made), settings={"trainer": {"total_training_steps": 8}})
    store = open_store(str(place))
    commit(store, keys.run_json(), description_json(run), new_write_id())
    for step in range(steps):
        metrics = {"critic/rewards/mean": 0.25 * (step + 1)}
        commit(store, keys.metrics(step), {"step": step, "metrics": metrics}, new_write_id())
    return store


def listed(place: Path) -> dict[str, ListedRun]:
    return {run.name: run for run in retrace.list_runs(place)}


def test_the_newest_attempt_determines_the_state_of_a_run(tmp_path):
    """It also determines the total number of steps."""
    runs = tmp_path / "store"
    make_run(runs / "new", 0)
    for reason in ("finished", "failed", "cancelled"):
        store = make_run(runs / reason, 3)
        end_attempt(store, make_attempt(store, 0, 8), "failed", "an older reason")
        end_attempt(store, make_attempt(store, 1, 3), reason, f"why it {reason}")
    make_attempt(make_run(runs / "at-work", 2), 0, 5)
    killed = make_run(runs / "killed", 2)
    make_attempt(killed, 0, 5)
    for path in (runs / "killed").rglob("*"):
        os.utime(path, (1_000_000, 1_000_000))
    found = listed(runs)
    assert {
        name: (run.state, run.finished_steps, run.total_steps) for name, run in found.items()
    } == {
        "at-work": ("running", 2, 5),
        "cancelled": ("cancelled", 3, 3),
        "failed": ("failed", 3, 3),
        "finished": ("finished", 3, 3),
        "killed": ("killed", 2, 5),
        "new": ("never started", 0, 8),
    }
    assert found["failed"].message == "why it failed"
    assert (found["new"].reward, found["failed"].reward) == (None, 0.75)
    assert found["killed"].modified_s == 1_000_000
    sizes = [path.stat().st_size for path in (runs / "failed").rglob("*") if path.is_file()]
    assert found["failed"].size == sum(sizes)


@pytest.mark.parametrize(
    ("owner", "quiet_s", "state"),
    [
        (living_owner, 10_000, "running"),
        (dead_owner, 0, "killed"),
        (distant_owner, 100, "running"),
        (distant_owner, 1000, "killed"),
        (lambda: distant_owner("a flow run"), 1000, "running"),
        (lambda: distant_owner("a flow run"), 1e6, "killed"),
    ],
)
def test_the_owner_decides_whether_a_run_is_running(tmp_path, owner, quiet_s, state):
    """A run whose owner is alive is not removed by accident."""
    store = make_run(tmp_path / "run", 1)
    attempt = make_attempt(store, 0, 5)
    store.delete(keys.attempt(0))
    body = attempt.body() | {"owner": owner_json(owner()), "start_timeout_s": 5e3}
    commit(store, keys.attempt(0), body, new_write_id())
    store.create(keys.sign(0, 3), b"")
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (time.time() - quiet_s,) * 2)
    assert find_run(str(tmp_path / "run")).state == state
    if state == "running":
        with pytest.raises(InputError):
            remove_run(str(tmp_path / "run"))
        assert store.size(keys.attempt(0)) is not None
    else:
        remove_run(str(tmp_path / "run"))
        assert not (tmp_path / "run").exists()


def test_a_run_that_was_refused_before_its_inputs_were_staged_is_listed_and_removed(tmp_path):
    store = open_store(str(tmp_path / "store/refused"))
    end_attempt(store, make_attempt(store, 0, 8), "failed", "the reward function raises")
    found = listed(tmp_path / "store")["refused"]
    assert (found.state, found.total_steps) == ("failed", 8)
    assert found.message == "the reward function raises"
    remove_run(str(tmp_path / "store/refused"))
    assert not (tmp_path / "store/refused").exists()


def test_damaged_runs_and_other_folders_are_named(tmp_path):
    make_run(tmp_path / "store/whole", 1)
    make_run(tmp_path / "store/cut", 1)
    (tmp_path / "store/cut/run.json").write_text("{")
    (tmp_path / "store/photos").mkdir()
    (tmp_path / "store/photos/cat.png").write_bytes(b"cat")
    sealed_r3(open_store(str(tmp_path / "store/set")), make_samples())
    make_run(tmp_path / "store/gap", 3).delete(keys.metrics(1))
    exchanged = make_run(tmp_path / "store/exchanged", 2)
    older = exchanged.read(keys.metrics(0))
    exchanged.delete(keys.metrics(1))
    exchanged.create(keys.metrics(1), older)
    found = listed(tmp_path / "store")
    assert {name: run.state for name, run in found.items()} == {
        "cut": "damaged",
        "exchanged": "damaged",
        "gap": "damaged",
        "photos": "no run",
        "set": "recorded set",
        "whole": "never started",
    }
    assert "run.json" in found["cut"].message
    assert keys.metrics(1) in found["gap"].message
    assert "this is the commit of {'step': 0}" in found["exchanged"].message
    assert found["photos"].size == 3


def test_removing_a_run_leaves_no_object(tmp_path):
    whole_run(open_store(str(tmp_path / "store/first")), tmp_path)
    make_run(tmp_path / "store/second", 1)
    (tmp_path / "store/first/steps/000000/.tmp-0123").write_bytes(b"unfinished")
    size = sum(p.stat().st_size for p in (tmp_path / "store/first").rglob("*") if p.is_file())
    assert retrace.remove_run(tmp_path / "store/first", force=True) == size
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["second"]


class Killed(BaseException):
    """A stand-in for a kill during a deletion."""


@pytest.mark.parametrize("after", [0, 1, 7, -2, -1])
def test_an_interrupted_removal_is_recognised_and_completed(tmp_path, monkeypatch, after):
    """At whatever point a removal is killed, the run is listed as half removed, and the next
    removal completes it."""
    place = tmp_path / "store/first"
    whole_run(open_store(str(place)), tmp_path)
    objects = len(list(open_store(str(place)).list(""))) + 1
    left = after if after >= 0 else objects + after
    delete = FileStore.delete

    def dying(self: FileStore, key: str) -> None:
        nonlocal left
        if not left:
            raise Killed
        left -= 1
        delete(self, key)

    monkeypatch.setattr(FileStore, "delete", dying)
    with pytest.raises(Killed):
        retrace.remove_run(place, force=True)
    monkeypatch.undo()
    assert listed(tmp_path / "store")["first"].state == "half removed"
    retrace.remove_run(place)
    assert listed(tmp_path / "store") == {}
    assert not place.exists()


def test_other_removals_are_refused(tmp_path):
    """Only runs are removed, and nothing is removed from a run in progress."""
    store = make_run(tmp_path / "store/run", 1)
    attempt = make_attempt(store, 0, 8)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").write_bytes(b"cat")
    sealed_r3(open_store(str(tmp_path / "set")), make_samples())
    make_run(tmp_path / "two/first", 0)
    sealed_r3(open_store(str(tmp_path / "two/second")), make_samples())
    (tmp_path / "my.yaml").touch()
    for place, says in (
        ("store/run", "the run is in progress"),
        ("photos", "expected a run, found no run.json and no sealed step"),
        ("set", "expected a run, found a recorded set"),
        ("nothing", "expected a run, found nothing"),
        ("store", f"store: a store of 1 run; pass that run: {tmp_path}/store/run$"),
        (
            "two",
            f"two: a store of 2 runs; pass one of them: {tmp_path}/two/first, {tmp_path}/two/sec",
        ),
        (
            "my.yaml",
            "my.yaml: found a settings file, expected a run; pass its run, such as "
            f"outputs/store/NAME, which `retrace check {tmp_path}/my.yaml` prints",
        ),
    ):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(retrace.InputError, match=says):
            retrace.remove_run(tmp_path / place)
        assert sorted(tmp_path.rglob("*")) == before
    end_attempt(store, attempt, "cancelled", "")
    assert retrace.remove_run(tmp_path / "store/run") > 0
