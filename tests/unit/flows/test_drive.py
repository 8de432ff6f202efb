"""The order in which the flow runs the steps of a run.

Prefect's tasks, the workers and the artifacts are small stand-ins in this process;
tests/integration/run uses the real ones.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.tree import RunConfig
from pipeline.flows import drive as module
from pipeline.flows.drive import drive
from pipeline.flows.steps import Context
from pipeline.inputs.stage import StagedRun
from pipeline.launch.base import LaunchError
from pipeline.report.run_metrics import StepMetrics, read_metrics
from pipeline.run import keys
from pipeline.run.attempts import Attempt, Claim, end_attempt
from pipeline.run.commit import commit, new_write_id, read_commit
from pipeline.run.plan import publish_plan
from pipeline.store import Store
from tests.attempts import make_attempt
from tests.memory_store import MemoryStore
from tests.samples import make_validation_plan


class CountingStore(MemoryStore):
    """Counts requests of each kind, and reads of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()
        self.reads_of: Counter[str] = Counter()

    def read(self, key: str, limit: int | None = None) -> bytes:
        self.requests["read"] += 1
        self.reads_of[key] += 1
        return super().read(key, limit)

    def size(self, key: str) -> int | None:
        self.requests["size"] += 1
        return super().size(key)

    def list(self, prefix: str) -> Any:
        self.requests["list"] += 1
        return super().list(prefix)


class Tables:
    """A stand-in for Artifacts that keeps the tables."""

    def __init__(self) -> None:
        self.tables: list[tuple[list[dict[str, Any]], str]] = []

    def progress(self, percent: float) -> None: ...
    def link(self, name: str, uri: str) -> None: ...

    def table(self, name: str, rows: list[dict[str, Any]], description: str) -> None:
        assert name == "metrics"
        self.tables.append((rows, description))


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def phase(self, who: str, what: str | None) -> None: ...
    def step(self, step: int, total: int) -> None: ...

    def line(self, text: str) -> None:
        self.lines.append(text)


class Workers:
    def check(self) -> bool:
        return False

    def stop(self, grace_s: float) -> None: ...

    def detach(self) -> bool:
        return False


class Done:
    """A task that does nothing, and is also the future of its own run."""

    def submit(self, *_: object) -> "Done":
        return self

    def result(self) -> None: ...


def finish(store: Store, step: int) -> None:
    """Finish a step as the trainer does, by writing its metrics."""
    metrics = {"critic/rewards/mean": float(step)}
    commit(store, keys.metrics(step), {"step": step, "metrics": metrics}, new_write_id())


def train(context: Context, step: int) -> StepMetrics:
    """Stand in for the task: finish the step immediately, log its metrics and return them."""
    finish(context.run.store, step)
    found = read_metrics(context.run.store, step)
    assert found is not None
    for tracker in context.trackers:
        tracker.log("step", step, found.values)
    return found


def take(
    store: Store,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    attempt: int | None = None,
    validations: Sequence[int] = (),
    **trainer: Any,
) -> tuple[Tables, Screen]:
    """Run `steps` steps to the end, in a new attempt or in the existing attempt `attempt`.

    `validations` gives the policy versions to validate; their results must be in the store.
    """
    number = attempt
    if number is None:
        number = sum(not info.key.endswith("stop.json") for info in store.list(keys.attempts()))
    made = make_attempt(store, number, steps, validations=validations)
    claim = Claim(made, continued=attempt is not None)
    return run_drive(store, claim, steps, monkeypatch, train, **trainer)


def run_drive(
    store: Store,
    claim: Claim,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    training: Callable[[Context, int], StepMetrics],
    **trainer: Any,
) -> tuple[Tables, Screen]:
    config = RunConfig.model_validate(
        {
            "data": {"train_files": "t.parquet"},
            "actor_rollout_ref": {"model": {"path": "m"}},
            "trainer": {
                "experiment_name": "test",
                "logger": ["console"],
                "total_training_steps": steps,
                **trainer,
            },
            "store": {"uri": "memory://"},
        }
    )
    run = StagedRun("test", store.uri, store, config, {}, None, 1, 0, ())
    monkeypatch.setattr(module, "rollout", Done())
    monkeypatch.setattr(module, "train", training)

    @contextlib.contextmanager
    def launch(config: RunConfig, run: StagedRun, attempt: Attempt) -> Iterator[Workers]:
        yield Workers()

    tables, screen = Tables(), Screen()
    drive(run, claim, screen, tables, launch)
    return tables, screen


def test_a_step_costs_as_many_requests_in_a_long_run_as_in_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
):
    """Each step's metrics are read once; the number of other requests does not grow."""
    fixed = []
    for steps in (10, 300):
        store = CountingStore()
        take(store, steps, monkeypatch)
        assert {store.reads_of[keys.metrics(step)] for step in range(steps)} == {1}
        fixed.append(store.requests.total() - steps)
    assert fixed[0] == fixed[1] < 10


def test_trackers_get_each_step_once_across_all_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """This includes a step that no tracker had received, because it finished after the flow had
    died."""
    store, trainer = tracked_run(tmp_path)
    take(store, 2, monkeypatch, **trainer)
    finish(store, 2)
    _, screen = take(store, 5, monkeypatch, **trainer)
    assert tracked(tmp_path) == [(step, {"critic/rewards/mean": step}) for step in range(5)]
    assert not [line for line in screen.lines if "file" in line]
    record = json.loads((tmp_path / "test/trackers/file.json").read_text())
    assert record == {
        "run": "test-1a2b3c4d",
        "last_step": 4,
        "last_validation": None,
        "failures": 0,
    }


@pytest.mark.parametrize("lost", ["step", "validation"])
def test_trackers_get_the_last_results_of_a_run_whose_flow_died_at_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: str
):
    """All results were in the store, but the flow died before it sent the last one."""
    store, trainer = tracked_run(tmp_path)
    take(store, 1 if lost == "step" else 2, monkeypatch, **trainer)
    store.delete(keys.stop(0))
    finish(store, 1)
    expected = [(step, {"critic/rewards/mean": step}) for step in range(2)]
    if lost == "validation":
        store_validation(store, 2)
        expected.append((2, {"val/reward/mean": 0.5}))
    for _ in range(2):  # the second start sends nothing, because the run is finished
        take(store, 2, monkeypatch, validations=[2] if lost == "validation" else [], **trainer)
        assert tracked(tmp_path) == expected


def tracked_run(folder: Path) -> tuple[Store, dict[str, Any]]:
    """Return the store of a run, and the settings that track it in a file."""
    store = MemoryStore()
    commit(store, keys.run_json(), {}, "1a2b3c4d")
    return store, {"logger": ["file"], "default_local_dir": str(folder)}


def tracked(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the lines in the file of a tracked run."""
    lines = (folder / "test/metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["data"]) for line in map(json.loads, lines)]


def store_validation(store: Store, version: int) -> None:
    """Store a complete validation with a mean reward of 0.5."""
    plan = publish_plan(store, make_validation_plan(version=version))
    for shard in range(plan.shards):
        place = {"version": version, "shard": shard}
        body = {**place, "reward_sum": 1.0, "count": 2, "masked": 0}
        commit(store, keys.validation(version, shard), body, new_write_id())


def test_a_flow_that_lost_its_attempt_stops_waiting(monkeypatch: pytest.MonkeyPatch):
    """Another start took this flow for dead. This flow must not end the other one's attempt."""
    store = MemoryStore()
    lost = [False]
    claim = Claim(make_attempt(store, 0, 2), continued=False, is_lost=lambda: lost[0])

    def wait(context: Context, step: int) -> StepMetrics:
        assert not context.workers.check()
        lost[0] = True
        end_attempt(store, claim.attempt, "cancelled", "it was silent")
        make_attempt(store, 1, 2)
        context.workers.check()
        pytest.fail("the flow continues")

    with pytest.raises(LaunchError, match=keys.stop(0)):
        run_drive(store, claim, 2, monkeypatch, wait)
    assert read_commit(store, keys.stop(0))["message"] == "it was silent"
    assert store.size(keys.stop(1)) is None
