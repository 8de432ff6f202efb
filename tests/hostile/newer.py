"""Stores with format 1.1 features: rejected groups, baselines, branches, context-parallel parts.

Like the stores in `worlds`, they are written by the project's own writers. `change` replaces the
samples, so that a twin has the same ids and lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pipeline.rl.group_filter import choose
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from pipeline.run.plan import publish_plan
from pipeline.store import Store
from pipeline.traces import (
    NewTrainingSet,
    Routes,
    Sample,
    read_manifest,
    seal,
    seal_training_set,
    shard_ids,
    write_shard,
    write_training_routes,
)
from pipeline.traces.write.library import write_step
from tests.memory_store import MemoryStore
from tests.samples import (
    GEOMETRY,
    R2,
    R3,
    STAGES,
    layers_of,
    make_plan,
    make_samples,
    train,
    without_routes,
    write_run,
)

Change = Callable[[Sequence[Sample]], Sequence[Sample]]

_METRIC = "seq_reward"
_PROMPTS = 3
"""Prompts per sub-plan."""
_ACCEPTED = 2
_N = 2
"""Samples per prompt, without the baseline."""


def filtered(mode: str, change: Change = list) -> dict[str, bytes]:
    """Return a run whose step has two sub-plans, four rejected groups and greedy baselines.

    All groups of shards 1 and 3 are rejected. Shards 0 and 2 each have an accepted and a rejected
    group.

    Args:
        mode: The step's routes: "R2" or "R3".
        change: Replaces the samples.
    """
    store = MemoryStore()
    samples = change(_rewarded(make_samples(2 * _PROMPTS, _N + 1, seed=5)))
    values = {
        group: [s.reward for s in samples if s.group == group and _number(s) < _N]
        for group in dict.fromkeys(sample.group for sample in samples)
    }
    chosen = choose(values, _METRIC, _ACCEPTED)
    filters = {"filter_groups": {"enable": True, "metric": _METRIC}}
    settings = {"algorithm": filters, "data": {"train_batch_size": _ACCEPTED}}
    write_run(store, samples, mode, b"{}", settings=settings)
    first = replace(make_plan(2 * _PROMPTS, _N), baseline=True)
    plans = [
        replace(first, prompts=first.prompts[at : at + _PROMPTS], sub_plan=number)
        for number, at in enumerate((0, _PROMPTS))
    ]
    ids = [shard_ids(plan, shard) for plan in plans for shard in range(plan.shards)]
    for plan in plans:
        publish_plan(store, plan)
    for shard, mine in enumerate(ids):
        of_shard = [sample for sample in samples if sample.id in mine]
        _write(store, shard, of_shard, routes=mode == "R3")
    accepted = [[id for id in mine if id.rpartition("/")[0] in chosen.accepted] for mine in ids]
    baselines = [sample.id for sample in samples if _number(sample) == _N]
    seal(
        store,
        0,
        len(ids),
        accepted.__getitem__,
        0,
        training=mode == "R2",
        rejected=chosen.rejected,
        baselines=baselines,
    )
    if mode == "R2":
        train(store, [sample for sample in samples if sample.group in chosen.accepted])
    commit(store, keys.metrics(0), {"step": 0, "metrics": {}}, "a")
    return store.objects


def _number(sample: Sample) -> int:
    return int(sample.id.rpartition("/")[2])


def _rewarded(samples: Sequence[Sample]) -> list[Sample]:
    """Give groups 1 and 4 equal rewards, and group 2 fewer than two rewards."""
    found = []
    for sample in samples:
        if sample.prompt_id in ("1", "4"):
            sample = replace(sample, reward=1.0)
        elif sample.prompt_id == "2" and _number(sample):
            sample = replace(sample, reward=None, reward_error="it raised")
        if _number(sample) == _N:  # a worker excludes a baseline from the loss
            sample = replace(sample, loss_mask_G=np.zeros_like(sample.loss_mask_G))
        found.append(sample)
    return found


def _write(store: Store, shard: int, samples: Sequence[Sample], routes: bool) -> None:
    if routes:
        write_shard(store, 0, shard, new_write_id(), samples, GEOMETRY, R3)
    else:
        write_shard(store, 0, shard, new_write_id(), without_routes(samples), None, None)


def branched(change: Change = list) -> dict[str, bytes]:
    """Return a recorded set whose conversations have branches: two of one sample, one of another.

    Args:
        change: Replaces the samples.
    """
    store: Store = MemoryStore()
    samples = make_samples(prompts=3, n=2, seed=7)
    firsts = [(samples[0], 1), (samples[0], 2), (samples[3], 1)]
    branches = [
        replace(
            other,
            id=f"{first.id}.{number}",
            group=first.group,
            prompt_id=first.prompt_id,
            branch_of=first.id,
        )
        for (first, number), other in zip(firsts, make_samples(prompts=3, n=1, seed=8), strict=True)
    ]
    write_step(store, 0, change([*samples, *branches]), GEOMETRY, R3)
    return store.objects


def cut(change: Change = list) -> dict[str, bytes]:
    """Return an R2 run in which two context-parallel ranks divide the rows of each sample.

    Args:
        change: Replaces the samples.
    """
    store = MemoryStore()
    samples = change(make_samples())
    write_run(store, samples, "R2", b"{}")
    publish_plan(store, make_plan())
    _write(store, 0, samples, routes=False)
    seal(store, 0, 1, lambda _: [sample.id for sample in samples], 0, training=True)
    new = NewTrainingSet(read_manifest(store, 0), R2)
    for stage, layers in STAGES:
        for cp_rank in range(2):
            routes, positions = {}, {}
            for sample in samples:
                assert sample.routes is not None
                quarters = np.array_split(np.arange(len(sample.routes.valid_T)), 4)
                at = np.concatenate([quarters[cp_rank], quarters[-1 - cp_rank]])
                mine = layers_of(sample.routes, layers)
                routes[sample.id] = Routes(mine.sets_TLK[at], mine.valid_T[at])
                positions[sample.id] = at
            geometry = replace(GEOMETRY, layers=tuple(layers))
            write_training_routes(
                store, new, stage, 0, routes, geometry, cp_rank=cp_rank, positions=positions
            )
    seal_training_set(store, new, GEOMETRY)
    commit(store, keys.metrics(0), {"step": 0, "metrics": {}}, "a")
    return store.objects
