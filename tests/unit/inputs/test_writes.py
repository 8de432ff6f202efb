"""How much a run writes: by hand for a large model, and what follows for a store on a small disk.
tests/integration/run compares the estimate with what a run has written."""

import shutil
from collections import namedtuple

import pytest

from pipeline.inputs.writes import Writes, estimate, needed_bytes, row_bytes
from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.store import open_store
from tests.unit.inputs.small_inputs import R3, REPLAY, check, load, the_error

QWEN3_30B = Geometry(128, 8, tuple(range(48)))
PARAMETERS = 30_500_000_000


def test_a_large_model_by_hand(settings):
    """docs/kubernetes.md: 61 GB a policy, 427 GB a checkpoint, 0.44 GB of traces of real routes,
    which pack 2.3 times as well as random ones."""
    more = ("data.train_batch_size=256", "actor_rollout_ref.rollout.n=8", *R3)
    config = load(settings, *more, "data.max_response_length=1800", "trainer.save_freq=5")
    writes = estimate(config, QWEN3_30B, PARAMETERS, prompt_tokens=200)
    assert (writes.policy, writes.checkpoint) == (61_000_000_000, 427_000_000_000)
    assert 0.44e9 < writes.routes < 3 * 0.44e9
    assert writes.samples == 40_000 + 2048 * 300 + 2048 * 2000 * 8
    assert writes.step == writes.policy + writes.samples + writes.routes


def test_what_is_recorded_counts(settings):
    """R2 records every sample's prompt; the engine's routes share that of a group. Neither without
    replay, nor of a dense model."""

    def routes(*overrides: str, geometry: Geometry | None = QWEN3_30B) -> int:
        return estimate(load(settings, *overrides), geometry, 10, prompt_tokens=100).routes

    assert routes() == 0
    assert routes(*R3, geometry=None) == 0
    row = row_bytes(QWEN3_30B)  # 4 prompts, 2 samples each of at most 8 tokens
    assert routes(*R3) == round((4 * 100 + 8 * 8) * row)
    assert routes(f"{REPLAY}.mode=R2") == round(8 * 108 * row)


def test_float32_is_larger(settings):
    config = load(settings, "actor_rollout_ref.actor.megatron.dtype=float32")
    writes = estimate(config, None, 1000, 10)
    assert (writes.policy, writes.checkpoint) == (4_000, 16_000)


def test_a_checkpoint_holds_the_critic_too(settings):
    """Which has the policy's shape; policies are published alone."""
    writes = estimate(load(settings, "algorithm.adv_estimator=gae"), None, 1000, 10)
    assert (writes.policy, writes.checkpoint) == (2_000, 28_000)


@pytest.mark.parametrize(
    ("first", "total", "needed"),
    [
        (0, 10, 7 + 2 * 10),  # the model, and two steps
        (1, 10, 2 * 10 + 100),  # step 2 ends with a checkpoint
        (9, 10, 10 + 100),  # the last step does, too
        (8, 10, 2 * 10 + 2 * 100),
        (10, 10, 0),
    ],
)
def test_the_next_two_steps(first, total, needed):
    assert needed_bytes(Writes(1, 2, 7, 100, save_freq=3), first, total) == needed


def test_a_disk_without_room_for_two_steps_is_refused(settings, monkeypatch):
    """By what is free, not by the size of the disk; a run that needs less room may go on."""
    writes = check(settings).writes
    assert writes is not None
    needed = needed_bytes(writes, 0, 2)
    usage = namedtuple("usage", "total used free")
    free = {"bytes": needed - 1}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**15, 0, free["bytes"]))
    problem = the_error(settings)
    store = settings.parent / "store"
    assert problem.startswith(f"store.uri: {store} has {needed - 1:,} bytes free (")
    assert f"need {needed:,} (" in problem
    assert problem.endswith("; free some space, or choose another place")
    free["bytes"] = needed
    check(settings)
    free["bytes"] = 0
    for step in range(2):  # a finished run writes nothing
        open_store(str(store / "test")).create(keys.metrics(step), b"{}")
    check(settings)
