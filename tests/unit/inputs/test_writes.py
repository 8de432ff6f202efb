"""The estimate of a run's writes, compared with manual arithmetic, and disks that are too small.

tests/integration/run compares the estimate with the objects that a run has written.
"""

import shutil
from collections import namedtuple

import pytest
from rich.filesize import decimal

from pipeline.cli.check import copies_line, writes_line
from pipeline.inputs.writes import Writes, estimate, needed_bytes, row_bytes
from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.store import open_store
from tests.unit.inputs.small_inputs import R3, REPLAY, check, load, the_error

QWEN3_30B = Geometry(128, 8, tuple(range(48)))
PARAMETERS = 30_500_000_000


def test_the_estimate_of_a_large_model_matches_manual_arithmetic(settings):
    """docs/kubernetes.md lists 61 GB per policy, 427 GB per checkpoint, and 0.43 GB of traces."""
    more = ("data.train_batch_size=256", "actor_rollout_ref.rollout.n=8", *R3)
    config = load(settings, *more, "data.max_response_length=1800", "trainer.save_freq=5")
    writes = estimate(config, QWEN3_30B, PARAMETERS, prompt_tokens=200)
    assert (writes.policy, writes.checkpoint) == (61_000_000_000, 427_000_000_000)
    assert 0.44e9 < writes.routes < 3 * 0.44e9
    assert writes.samples == 40_000 + 2048 * 300 + 2048 * 2000 * 8
    assert writes.step == writes.policy + writes.samples + writes.routes


@pytest.mark.parametrize(
    ("overrides", "parameters", "every"),
    [
        ((), PARAMETERS, 16),
        ((), (1 << 29), 16),
        ((), (1 << 29) - 1, None),
        (("store.policy_deltas.every=4",), PARAMETERS, 4),
        (("store.policy_deltas.enable=true",), 1, 16),
        (("store.policy_deltas.every=1",), PARAMETERS, None),
        (("store.policy_deltas.enable=false",), PARAMETERS, None),
    ],
)
def test_large_policies_are_differences(settings, overrides, parameters, every):
    """By default, policies of 1 GiB or more, at 2 bytes per weight, are written as differences."""
    writes = estimate(load(settings, *overrides), None, parameters, 10)
    assert (writes.whole_every, writes.policy) == (every, 2 * parameters)
    line = writes_line(writes)
    assert ("whole every" in line) == (every is not None)
    assert every is None or f"of at most {decimal(parameters)}" in line


def test_recorded_routes_are_counted(settings):
    """With R2, the prompt's routes are recorded for every sample; with R3, once per group."""

    def routes(*overrides: str, geometry: Geometry | None = QWEN3_30B) -> int:
        return estimate(load(settings, *overrides), geometry, 10, prompt_tokens=100).routes

    assert routes() == 0
    assert routes(*R3, geometry=None) == 0
    row = row_bytes(QWEN3_30B)  # 4 prompts with 2 samples each, of at most 8 tokens
    assert routes(*R3) == round((4 * 100 + 8 * 8) * row)
    assert routes(f"{REPLAY}.mode=R2") == round(8 * 108 * row)


def test_float32_policies_and_checkpoints_are_larger(settings):
    config = load(settings, "actor_rollout_ref.actor.megatron.dtype=float32")
    writes = estimate(config, None, 1000, 10)
    assert (writes.policy, writes.checkpoint) == (4_000, 16_000)


@pytest.mark.parametrize(
    ("first", "total", "needed"),
    [
        (0, 10, 7 + 2 * 10),  # the model, and two steps
        (1, 10, 2 * 10 + 100),  # step 2 ends with a checkpoint
        (9, 10, 10 + 100),  # the last step always ends with a checkpoint
        (8, 10, 2 * 10 + 2 * 100),
        (10, 10, 0),
    ],
)
def test_the_next_two_steps_are_counted(first, total, needed):
    assert needed_bytes(Writes(1, 2, 7, 100, save_freq=3), first, total) == needed


def test_copies_that_workers_keep_outside_the_store_are_counted(settings):
    """Training ranks keep the policy only to write differences; a replayed run has no engines."""

    def copies(*overrides: str) -> tuple[int, int, str]:
        config = load(settings, "launch.rollout_workers=3", *overrides)
        writes = estimate(config, None, PARAMETERS, 10)
        line = copies_line(writes, config.store.policy_cache)
        return writes.rank_copies, writes.engine_copies, line

    size = 2 * PARAMETERS
    assert copies()[:2] == (size, size)
    assert copies()[2].count("61.0 GB under TMPDIR") == 2
    in_memory = copies("store.policy_deltas.enable=false", "store.policy_cache=memory")
    assert in_memory[:2] == (0, size)
    assert "61.0 GB in /dev/shm" in in_memory[2]
    assert copies("store.policy_deltas.every=1", "store.policy_deltas.enable=true")[0] == 0
    replayed = f"{REPLAY}.replay_file=/recorded"
    off = ("store.policy_deltas.enable=false", "launch.rollout_workers=null")
    assert copies(replayed, *off) == (0, 0, "")


def test_a_disk_without_space_for_the_copies_is_noted(settings, monkeypatch):
    """If the store is on the same disk, the note also counts the writes of the next two steps."""
    deltas = "store.policy_deltas.enable=true"
    ready = check(settings, deltas)
    writes = ready.writes
    assert writes is not None
    needed = needed_bytes(writes, 0, 2) + writes.rank_copies + writes.engine_copies
    usage = namedtuple("usage", "total used free")
    free = {"bytes": needed}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**15, 0, free["bytes"]))
    assert check(settings, deltas).notes == ready.notes
    free["bytes"] = needed - 1
    [note] = set(check(settings, deltas).notes) - set(ready.notes)
    assert f"needs {decimal(needed)}" in note
    assert f"{decimal(writes.engine_copies)} that rollout workers keep" in note


def test_a_disk_without_space_for_two_steps_is_refused(settings, monkeypatch):
    """The check considers the free space, not the size of the disk. A finished run needs none."""
    writes = check(settings).writes
    assert writes is not None
    needed = needed_bytes(writes, 0, 2)
    usage = namedtuple("usage", "total used free")
    free = {"bytes": needed - 1}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**15, 0, free["bytes"]))
    problem = the_error(settings)
    store = settings.parent / "store"
    assert problem.startswith(f"store.uri: {store} has {needed - 1:,} bytes free")
    assert f"need {needed:,}" in problem
    free["bytes"] = needed
    check(settings)
    free["bytes"] = 0
    for step in range(2):  # a finished run writes nothing
        open_store(str(store / "test")).create(keys.metrics(step), b"{}")
    check(settings)
