"""How the flow takes a run through its steps. Prefect's tasks, the workers and the artifacts are
small stand-ins in this process; tests/integration/run has the real ones."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.tree import RunConfig
from pipeline.flows import drive as module
from pipeline.flows.drive import WorkerHost, drive
from pipeline.flows.steps import Context
from pipeline.inputs.stage import StagedRun
from pipeline.report.run_metrics import StepMetrics, read_metrics
from pipeline.report.tables import SHOWN_STEPS
from pipeline.run import keys
from pipeline.run.attempts import Attempt
from pipeline.run.commit import commit, new_write_id
from pipeline.store import Store
from tests.attempts import make_attempt
from tests.memory_store import MemoryStore


class CountingStore(MemoryStore):
    """Counts the requests for objects by kind, and those for the metrics of each step."""

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
    """Stands in for Artifacts: keeps the tables."""

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
    """A task that has nothing to do: the future of its run."""

    def submit(self, *_: object) -> "Done":
        return self

    def result(self) -> None: ...


def finish(store: Store, step: int) -> None:
    """A step as the trainer ends it."""
    commit(
        store, keys.metrics(step), {"metrics": {"critic/rewards/mean": float(step)}}, new_write_id()
    )


def train(context: Context, step: int) -> StepMetrics:
    """The task's own last request, with a trainer that is ready at once."""
    finish(context.run.store, step)
    found = read_metrics(context.run.store, step)
    assert found is not None
    for tracker in context.trackers:
        tracker.log_step(step, found.values)
    return found


def take(
    store: Store,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    attempt: int | None = None,
    **trainer: Any,
) -> tuple[Tables, Screen]:
    """Take a run of so many steps to its end, in a new attempt or one that is there."""
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
    monkeypatch.setattr(module, "train", train)

    @contextlib.contextmanager
    def launch(config: RunConfig, run: StagedRun, attempt: Attempt) -> Iterator[Workers]:
        yield Workers()

    number = attempt
    if number is None:
        number = sum(not info.key.endswith("stop.json") for info in store.list(keys.attempts()))
    host = WorkerHost(lambda store, _: make_attempt(store, number, steps), launch)
    tables, screen = Tables(), Screen()
    drive(config, run, screen, tables, host)
    return tables, screen


def test_a_step_costs_as_many_requests_in_a_long_run_as_in_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
):
    """Each step's metrics are read once; what there is apart from that does not grow."""
    fixed = []
    for steps in (10, 300):
        store = CountingStore()
        take(store, steps, monkeypatch)
        assert {store.reads_of[keys.metrics(step)] for step in range(steps)} == {1}
        fixed.append(store.requests.total() - steps)
    assert fixed[0] == fixed[1] < 10


def test_trackers_get_each_step_once_over_all_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Also a step that was finished when the flow was killed, and that no tracker has seen."""
    store = MemoryStore()
    commit(store, keys.run_json(), {}, "1a2b3c4d")
    trainer = {"logger": ["file"], "default_local_dir": str(tmp_path)}
    take(store, 2, monkeypatch, **trainer)
    finish(store, 2)
    _, screen = take(store, 5, monkeypatch, **trainer)
    lines = (tmp_path / "test/metrics.jsonl").read_text().splitlines()
    steps = [(line["step"], line["data"]["critic/rewards/mean"]) for line in map(json.loads, lines)]
    assert steps == [(step, step) for step in range(5)]
    assert not [line for line in screen.lines if "file" in line]
    record = json.loads((tmp_path / "test/trackers/file.json").read_text())
    assert record == {"run": "test-1a2b3c4d", "last_step": 4}


def test_attaching_counts_steps_by_their_names(monkeypatch: pytest.MonkeyPatch):
    """Only the metrics that the table shows are read, and one listing says how many there are."""
    store = CountingStore()
    for step in range(500):
        finish(store, step)
    commit(
        store, keys.metrics(507), {"metrics": {}}, new_write_id()
    )  # finished means: all before it, too
    store.requests.clear()
    tables, screen = take(store, 501, monkeypatch)
    assert "500 steps are finished already" in screen.lines[0]
    assert store.requests["read"] <= SHOWN_STEPS + 5
    assert store.requests.total() <= SHOWN_STEPS + 15
    assert len(tables.tables) == 1


def test_the_table_of_metrics_shows_the_newest_steps(monkeypatch: pytest.MonkeyPatch):
    """It is sent anew at each step, so it must not grow; before it is full it shows all steps, and
    those that an earlier start of the flow finished too."""
    store = CountingStore()
    first, _ = take(store, 2, monkeypatch)
    assert [row["step"] for row in first.tables[-1][0]] == [0, 1]
    assert first.tables[-1][0][1]["critic/rewards/mean"] == 1.0
    steps = SHOWN_STEPS + 7
    again, _ = take(store, steps, monkeypatch)
    assert [row["step"] for row in again.tables[0][0]] == [0, 1, 2]
    rows, description = again.tables[-1]
    assert [row["step"] for row in rows] == list(range(7, steps))
    assert f"{SHOWN_STEPS} of {steps} finished steps" in description
    assert f"{store.uri}/steps/*/metrics.json" in description
    assert max(len(rows) for rows, _ in again.tables) == SHOWN_STEPS


@pytest.mark.parametrize(
    ("finished", "checkpoint", "says"),
    [
        (1, None, ["no checkpoint yet: training step 0 again before step 1"]),
        (3, None, ["no checkpoint yet: training steps 0 to 2 again (3 steps) before step 3"]),
        (3, 2, ["the last checkpoint is of policy 2: training step 2 again before step 3"]),
        (3, 3, []),
        (0, None, []),
        (4, 2, []),  # nothing is trained any more
    ],
)
def test_what_a_restart_trains_again_is_said(
    monkeypatch: pytest.MonkeyPatch, finished: int, checkpoint: int | None, says: list[str]
):
    """It takes as long as it took before, and no step of it appears."""
    store = CountingStore()
    for step in range(finished):
        finish(store, step)
    if checkpoint is not None:
        commit(store, keys.checkpoint(checkpoint), {}, new_write_id())
    _, screen = take(store, 4, monkeypatch)
    assert [line for line in screen.lines if "again" in line] == says


def test_workers_that_a_flow_attaches_to_train_nothing_again(monkeypatch: pytest.MonkeyPatch):
    store = CountingStore()
    finish(store, 0)
    make_attempt(store, 0, 4)
    _, screen = take(store, 4, monkeypatch, attempt=0)
    assert not [line for line in screen.lines if "again" in line]
