"""With damaged objects, training raises a known error, or reads the true rows and files."""

import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from operators.training.batches.step_data import StepData, layout_rules, load_step
from operators.training.errors import ReplayError
from operators.training.megatron.checkpoint.loading import read_checkpoint
from pipeline.config.tree import RunConfig
from pipeline.policies.fetch import fetch_policy
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, fetch_file, files_in
from pipeline.store import Store, StoreError
from pipeline.traces import Geometry, TraceError, open_manifest
from tests.damage import KINDS, damages, world
from tests.damage_judge import lists_of, vars_of
from tests.exhaustive import sample_or_all
from tests.memory_store import MemoryStore
from tests.samples import GEOMETRY, STAGES

pytestmark = pytest.mark.integration

CONFIG = RunConfig.model_validate(
    {
        "data": {},
        "actor_rollout_ref": {
            "model": {"path": "m"},
            "actor": {"router_replay": {"mode": "R3"}, "ppo_micro_batch_size_per_gpu": 1},
        },
        "trainer": {"experiment_name": "x"},
    }
)
PLACES = [
    (dp_rank, Geometry(GEOMETRY.experts, GEOMETRY.topk, layers))
    for dp_rank in range(2)
    for _, layers in STAGES
]
"""Two data-parallel ranks on each of two pipeline stages."""


def load(store: Store, dp_rank: int, geometry: Geometry) -> tuple[object, ...]:
    """Return everything that a rank reads from a step, as plain values.

    Args:
        store: The run's store.
        dp_rank: The rank's data-parallel index.
        geometry: The geometry of the rank's pipeline stage.
    """
    rules = layout_rules(CONFIG, 2)
    data: StepData | None = None
    try:
        data = load_step(store, open_manifest(store, 0), CONFIG, rules, dp_rank, geometry)
        assert data.routes is not None
        return (
            {id: vars_of(sample) for id, sample in data.samples.items()},
            sorted(data.untrained),
            data.columns.to_pylist(),
            {id: lists_of(data.routes[id]) for id in data.samples},
        )
    finally:
        if data is not None:
            data.close()


@cache
def truth(place: int) -> tuple[object, ...]:
    return load(MemoryStore(world("R3").objects), *PLACES[place])


def test_a_rank_refuses_damage(capsys):
    """All four ranks of a layout read hundreds of damaged steps."""
    counts: Counter[str] = Counter()
    for damage in damages("R3", KINDS, range(sample_or_all(1, 10))):
        if not any(key.startswith(keys.step_prefix(0)) for key in damage.changes):
            continue
        store = MemoryStore(damage.of(world("R3").objects))
        for place, of_rank in enumerate(PLACES):
            try:
                found = load(store, *of_rank)
            except (TraceError, StoreError, ReplayError):
                counts["refused"] += 1
            else:
                assert found == truth(place), damage
                counts["the true rows"] += 1
    with capsys.disabled():
        sys.stdout.write(f"\nreads by ranks of damaged steps: {dict(counts)}, 0 wrong\n")
    assert min(counts["refused"], counts["the true rows"]) > 100


def files_of_a_restart(store: Store, folder: Path) -> dict[str, bytes]:
    """Fetch the policy and the checkpoint for a restart; return their files, keyed by name."""
    fetch_policy(store, 1, folder / "policy")
    for file in files_in(read_checkpoint(store, 1)):
        fetch_file(store, file, folder / file.key.rsplit("/", 1)[-1])
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_restart_refuses_damage(tmp_path):
    """A restart reads the correct policy and checkpoint, or raises an error.

    After an error, every fetched file has the correct contents.
    """
    objects = world("R3").objects
    right = files_of_a_restart(MemoryStore(objects), tmp_path / "right")
    assert set(right) == {"config.json", "model.safetensors", "state"}
    refused = 0
    for number, damage in enumerate(damages("R3", KINDS, range(sample_or_all(2, 20)))):
        if not damage.key.startswith(("policies/", "checkpoints/")):
            continue
        folder = tmp_path / str(number)
        try:
            found = files_of_a_restart(MemoryStore(damage.of(objects)), folder)
        except (StoreError, CorruptObjectError):
            refused += 1
            found = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            assert found.items() <= right.items(), damage
        else:
            assert found == right, damage
    assert refused > 100
