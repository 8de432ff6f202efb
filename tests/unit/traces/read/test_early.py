"""Shards that are read before the seal must be those of the sealed step, or they are refused."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.store import ObjectMissingError
from pipeline.traces import (
    RouteStream,
    TraceError,
    VersionSpan,
    check_shard,
    open_manifest,
    open_shard,
    read_manifest,
    read_routes,
    read_samples,
    seal,
    used_routes,
    write_shard,
)
from tests.samples import (
    GEOMETRY,
    R3,
    equal,
    make_samples,
    same_sample,
    sealed_r2,
    sealed_r3,
    train,
    write_shards,
)

SAMPLES = make_samples(prompts=4)
SHARDS = [[s for s in SAMPLES if int(s.prompt_id) % 2 == shard] for shard in range(2)]


@pytest.fixture
def shards(store):
    """Commit two shards of step 0, which is not sealed."""
    write_shards(store, SAMPLES)


def sealed(store):
    return seal(store, 0, 2, lambda shard: [s.id for s in SHARDS[shard]], 0).all()


def test_a_shard_is_read_before_the_seal_and_compared_after_it(store, shards):
    early = [open_shard(store, 0, np.int64(shard)) for shard in range(2)]
    found = [read_routes(store, shard, shard.ids) for shard in early]
    streamed = RouteStream(store, early[1], GEOMETRY.layers)
    samples = [read_samples(store, shard, shard.ids) for shard in early]
    manifest = sealed(store)
    for shard, written in enumerate(SHARDS):
        assert check_shard(manifest, early[shard]) == [s.id for s in written]
        assert all(equal(found[shard][s.id], s.routes) for s in written)
        assert all(map(same_sample, samples[shard], written))
    assert all(equal(streamed[s.id], s.routes) for s in SHARDS[1])
    for shard, table in zip(
        early, (manifest.rows.slice(0, 4), manifest.rows.slice(4)), strict=True
    ):
        for name in ("token_digest", "rows_valid", "reward", "not_trained", "branch_of"):
            assert shard.rows[name].to_pylist() == table[name].to_pylist()


def test_shards_that_are_not_there_are_refused(store, shards):
    with pytest.raises(ObjectMissingError, match="rollout/00002"):
        open_shard(store, 0, 2)
    store.create(keys.rollout(0, 7), store.read(keys.rollout(0, 1)))
    with pytest.raises(TraceError, match="rollout/00007"):
        open_shard(store, 0, 7)
    for step, shard in ((0, "0"), (False, 0), (-1, 0), (0, 10**6)):
        with pytest.raises(TraceError, match="expected"):
            open_shard(store, step, shard)


def test_a_commit_that_was_not_sealed_is_refused(store, shards):
    """The shard was removed and written again between the early read and the seal."""
    early = open_shard(store, 0, 0)
    store.delete(keys.rollout(0, 0))
    changed = [replace(sample, seed=sample.seed + 1) for sample in SHARDS[0]]
    write_shard(store, 0, 0, new_write_id(), changed, GEOMETRY, R3)
    with pytest.raises(TraceError, match=early.files[0].key):
        check_shard(sealed(store), early)


@pytest.mark.parametrize("audited", [False, True])
def test_the_manifest_of_a_trainers_routes_is_refused(store, audited):
    """`used_routes` returns R2 routes, but a shard has those of the engine, or none."""
    if audited:
        sealed_r3(store, SAMPLES, training=True)
        train(store, SAMPLES)
    else:
        sealed_r2(store, SAMPLES)
    shard = open_shard(store, 0, 0)
    with pytest.raises(TraceError, match="pass read_manifest"):
        check_shard(used_routes(store, 0), shard)
    assert check_shard(read_manifest(store, 0), shard) == shard.ids


def test_a_step_without_its_rows_is_refused(store, shards):
    early = open_shard(store, 0, 0)
    sealed(store)
    step = open_manifest(store, 0)
    for given in (step, step.head, None):
        with pytest.raises(TraceError, match=r"sealed step: .*read_manifest"):
            check_shard(given, early)
    with pytest.raises(TraceError, match=r"shard: found a SealedManifest"):
        check_shard(step.all(), step)


def test_an_early_shard_has_the_policy_versions_of_its_sealed_step(store):
    """A response may contain tokens of several versions."""
    sample = make_samples(prompts=1, n=1)[0]
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, len(sample.response_tokens_G)))
    write_shard(store, 0, 0, new_write_id(), [replace(sample, version_spans=spans)], GEOMETRY, R3)
    early = open_shard(store, 0, 0).policy_versions
    seal(store, 0, 1, lambda _: [sample.id], None)
    assert early == read_manifest(store, 0).policy_versions == (3, 4)
