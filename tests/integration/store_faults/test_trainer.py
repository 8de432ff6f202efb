"""What a training rank makes of a damaged step: an error of ours, or the true rows."""

import sys
from collections import Counter
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings

from operators.training.data import StepData, layout_rules, load_step
from operators.training.replay import ReplayError
from pipeline.config.tree import RunConfig
from pipeline.store import Store, StoreError, keys
from pipeline.traces import Geometry, TraceError, open_manifest
from tests.memory_store import MemoryStore
from tests.unit.traces.damage import Damage, damages, world
from tests.unit.traces.judge import lists_of, vars_of
from tests.unit.traces.make import GEOMETRY, STAGES

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
"""Two data-parallel ranks of two pipeline stages."""


def load(store: Store, dp_rank: int, geometry: Geometry) -> tuple[object, ...]:
    """All that a rank reads of a step, as plain values."""
    rules = layout_rules(CONFIG, 2)
    data: StepData | None = None
    try:
        data = load_step(store, open_manifest(store, 0), CONFIG, rules, dp_rank, geometry)
        assert data.routes is not None
        return (
            {id: vars_of(sample) for id, sample in data.samples.items()},
            dict(data.advantages),
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
    """Hundreds of cases, each read by all four ranks of a layout."""
    counts: Counter[str] = Counter()

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damages(world("R3")))
    def check(damage: Damage) -> None:
        objects = {**world("R3").objects, **damage.changes}
        store = MemoryStore({key: data for key, data in objects.items() if data is not None})
        if not any(key.startswith(keys.step_prefix(0)) for key in damage.changes):
            return
        for place, of_rank in enumerate(PLACES):
            try:
                found = load(store, *of_rank)
            except (TraceError, StoreError, ReplayError):
                counts["refused"] += 1
            else:
                assert found == truth(place), damage
                counts["the true rows"] += 1

    check()
    with capsys.disabled():
        sys.stdout.write(f"\nreads by ranks of damaged steps: {dict(counts)}, 0 wrong\n")
    assert min(counts["refused"], counts["the true rows"]) > 100
