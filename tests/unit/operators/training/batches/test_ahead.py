"""Reading during computation: micro-batches are laid out on access, and the next step is loaded in
advance."""

import threading
import types

import numpy as np
import pytest

from operators.training.batches.ahead import Ahead
from operators.training.batches.layout import LayoutRules, make_layout
from operators.training.batches.micro_batch import Slice
from operators.training.passes.share import lay_out_share, make_replay
from operators.zigzag import ALL
from pipeline.store import StoreError
from tests.unit.operators.training.batches.test_layout import GEOMETRY, coded_routes, make_sample

LIMIT_S = 30


@pytest.fixture
def step():
    """Six samples in three micro-batches of one rank; no sample has been read yet."""
    ids = [f"000000/{i}/0" for i in range(6)]
    layout = make_layout(0, np.arange(6), np.full(6, 7), LayoutRules(0, 6, 2, 1, 1))
    (mini_batch,) = layout.mini_batches
    batches = [tuple(ids[row] for row in micro.rows) for micro in mini_batch.shares[0]]
    data = types.SimpleNamespace(
        samples={}, ids=dict(enumerate(ids)), untrained=frozenset(), routes=None
    )
    position = types.SimpleNamespace(dp_rank=0, sequence=Slice(), context=ALL)
    algorithm = types.SimpleNamespace(mask_truncated_samples=False)
    config = types.SimpleNamespace(algorithm=algorithm)
    rank = types.SimpleNamespace(geometry=GEOMETRY, position=position, config=config)
    return rank, data, mini_batch, batches


def arrive(data, routes, ids):
    for id in ids:
        data.samples[id] = make_sample(id, 3, 5)
        routes[id] = coded_routes(data.samples[id])


def test_a_micro_batch_is_laid_out_from_only_its_own_samples_and_routes(step):
    """No samples are read when the share and its replayers are created."""
    rank, data, mini_batch, ids = step
    routes = {}
    batches = lay_out_share(rank, data, mini_batch, routes)
    replay = make_replay(rank, batches, routes)
    assert (len(batches), sorted(replay.replayers)) == (3, [1, 3])
    for number in range(3):
        with pytest.raises(KeyError):
            batches[number]
        arrive(data, routes, ids[number])
        assert batches[number].response.ids == ids[number]


class Loader:
    """A fake loader that records which steps it loads, and whether it runs in the main thread."""

    def __init__(self):
        self.sealed = threading.Event()
        self.loaded = threading.Event()
        self.loads = []
        self.closed = []
        self.error = None

    def load(self, step):
        self.loads.append((step, threading.current_thread() is threading.main_thread()))
        self.loaded.set()
        if self.error is not None:
            raise self.error
        return types.SimpleNamespace(step=step, close=lambda: self.closed.append(step))

    def is_sealed(self, step):
        return self.sealed.is_set()


def test_a_step_sealed_in_the_meantime_is_loaded_in_the_background():
    loader = Loader()
    ahead = Ahead(loader.load, loader.is_sealed)
    ahead.prepare(4)
    assert not loader.loads
    loader.sealed.set()
    assert loader.loaded.wait(LIMIT_S)
    assert ahead.take(4).step == 4
    assert loader.loads == [(4, False)]
    ahead.close()
    assert not loader.closed


def test_take_loads_a_step_that_the_thread_has_not_yet_found_sealed():
    """`take` does not wait for the thread's next check, and the step is not loaded twice."""
    loader = Loader()
    ahead = Ahead(loader.load, loader.is_sealed)
    ahead.prepare(4)
    assert ahead.take(4).step == 4
    ahead.close()
    assert loader.loads == [(4, True)]


def test_take_raises_the_error_with_which_loading_ahead_failed():
    loader = Loader()
    loader.sealed.set()
    loader.error = StoreError("read steps/000004/manifest.json: the server is gone")
    ahead = Ahead(loader.load, loader.is_sealed)
    ahead.prepare(4)
    assert loader.loaded.wait(LIMIT_S)
    with pytest.raises(StoreError, match="the server is gone"):
        ahead.take(4)
    ahead.close()


def test_a_prepared_step_that_is_never_taken_is_closed():
    """When a run is stopped, its threads must end too."""
    loader = Loader()
    loader.sealed.set()
    ahead = Ahead(loader.load, loader.is_sealed)
    ahead.prepare(4)
    assert loader.loaded.wait(LIMIT_S)
    ahead.close()
    assert loader.closed == [4]
