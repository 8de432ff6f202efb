"""The times that a worker records for loading policy versions; these tests need no engine."""

from contextlib import closing
from types import SimpleNamespace

import pytest

from operators.rollout import worker as module
from operators.rollout.worker import Worker
from pipeline.policies import cache
from pipeline.policies.cache import PolicyCache, PolicyTimes
from pipeline.store import open_store
from tests.attempts import make_attempt
from tests.policies import write_chain
from tests.unit.flows.test_sub_plans import config_of

TRAINING_S, FETCH_S, LOAD_S = 100.0, 8.0, 2.0


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    """A clock on which waiting for a version, fetching it and loading it take known times."""
    clock, fetch = Clock(), cache.fetch_version

    def fetch_version(*arguments):
        clock.sleep(FETCH_S)
        return fetch(*arguments)

    def wait_for_any(store, wanted, timeout_s, maker):
        clock.sleep(TRAINING_S)
        return wanted[-1]

    monkeypatch.setattr(cache, "fetch_version", fetch_version)
    monkeypatch.setattr(module, "wait_for_any", wait_for_any)
    for of in (cache, module):
        monkeypatch.setattr(of, "time", clock)
    return clock


def test_a_stall_covers_loading_and_the_rest_of_the_fetch(clock, tmp_path):
    """A stall includes neither waiting for the trainer nor a fetch during generation."""
    store = open_store(str(tmp_path / "store"))
    write_chain(store, first=1, count=3)
    engine = SimpleNamespace(version=0, load=lambda *_: clock.sleep(LOAD_S))
    with closing(PolicyCache(store, tmp_path)) as policies:
        worker = Worker(
            store=store,
            index=0,
            attempt=make_attempt(store, 0, 3),
            inputs=SimpleNamespace(config=config_of()),
            engine=engine,
            weights="",
            policies=policies,
            ahead=SimpleNamespace(fetch=lambda version: None),
            scorer=None,
            step=0,
            validations=[],
        )
        assert worker._load(1)
        assert worker.times == PolicyTimes(fetch=FETCH_S, stall=FETCH_S + LOAD_S)
        worker.times = PolicyTimes()
        policies.fetch(2)
        assert worker._load(2)
        assert worker.times == PolicyTimes(fetch=FETCH_S, stall=LOAD_S)
        assert worker._load(3)
        assert worker.times == PolicyTimes(fetch=2 * FETCH_S, stall=FETCH_S + 2 * LOAD_S)
