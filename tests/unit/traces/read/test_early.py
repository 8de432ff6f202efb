"""Shards that are read before the seal must match the sealed step, or they are refused."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
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
from pipeline.traces.write import writer
from tests.samples import GEOMETRY, R3, make_samples, sealed_r2, sealed_r3, train


@pytest.fixture
def shards(store):
    """Commit two shards of step 0, which is not sealed."""
    made = [make_samples(prompts=3, seed=shard) for shard in range(2)]
    renamed = [
        replace(
            s,
            id=s.id.replace("/", "/1", 1),
            group=s.group.replace("/", "/1", 1),
            prompt_id=f"1{s.prompt_id}",
        )
        for s in made[1]
    ]
    for shard, samples in enumerate((made[0], renamed)):
        write_shard(store, 0, shard, new_write_id(), samples, GEOMETRY, R3)
    return made[0], renamed


def sealed(store, shards):
    ids = [sorted(sample.id for sample in samples) for samples in shards]
    seal(store, 0, 2, lambda shard: ids[shard], 0)
    return read_manifest(store, 0)


def test_a_shard_is_read_before_the_seal_and_compared_after_it(store, shards):
    early = [open_shard(store, 0, shard) for shard in range(2)]
    found = [read_routes(store, shard, shard.ids) for shard in early]
    streamed = RouteStream(store, early[1], GEOMETRY.layers)
    manifest = sealed(store, shards)
    assert [id for shard in early for id in check_shard(manifest, shard)] == manifest.ids
    for id, expected in read_routes(store, manifest, manifest.ids).items():
        of = found[0] if id in found[0] else found[1]
        assert np.array_equal(of[id].sets_TLK, expected.sets_TLK)
        assert np.array_equal(of[id].valid_T, expected.valid_T)
        if id in streamed:
            assert np.array_equal(streamed[id].sets_TLK, expected.sets_TLK)
    tokens = {s.id: s.tokens_S for samples in shards for s in samples}
    for sample in read_samples(store, early[1], early[1].ids):
        assert np.array_equal(sample.tokens_S, tokens[sample.id])


def test_a_shard_that_is_not_committed_is_missing(store):
    with pytest.raises(ObjectMissingError, match="rollout/00000"):
        open_shard(store, 0, 0)


def test_a_commit_under_another_key_is_refused(store, shards):
    store.create(keys.rollout(0, 7), store.read(keys.rollout(0, 1)))
    with pytest.raises(TraceError, match=r"the commit of .*'shard': 1"):
        open_shard(store, 0, 7)


def test_a_commit_that_was_not_sealed_is_refused(store, shards):
    """The shard was removed and written again between the early read and the seal."""
    early = open_shard(store, 0, 0)
    store.delete(keys.rollout(0, 0))
    changed = [replace(sample, seed=sample.seed + 1) for sample in shards[0]]
    write_shard(store, 0, 0, new_write_id(), changed, GEOMETRY, R3)
    with pytest.raises(TraceError, match="was not sealed with"):
        check_shard(sealed(store, shards), early)


@pytest.mark.parametrize("audited", [False, True])
def test_the_manifest_of_a_trainers_routes_is_refused_with_the_fix(store, audited):
    """`used_routes` returns R2 routes, but a shard has those of the engine, or none."""
    samples = make_samples()
    if audited:
        sealed_r3(store, samples, training=True)
        train(store, samples)
    else:
        sealed_r2(store, samples)
    shard = open_shard(store, 0, 0)
    with pytest.raises(TraceError, match=r"recorded by the trainer \(R2\), .*pass read_manifest"):
        check_shard(used_routes(store, 0), shard)
    assert check_shard(read_manifest(store, 0), shard) == shard.ids


def test_a_sealed_step_with_different_values_for_a_sample_is_refused(store, shards):
    early = open_shard(store, 0, 0)
    manifest = sealed(store, shards)
    place = manifest.rows.schema.get_field_index("routes_digest")
    digests = ["0" * 64, *manifest.rows["routes_digest"].to_pylist()[1:]]
    forged = manifest.rows.set_column(
        place, manifest.rows.schema.field(place), pa.array(digests, pa.string())
    )
    with pytest.raises(
        TraceError, match="routes_digest of its samples differs between the sealed step"
    ):
        check_shard(replace(manifest, rows=forged), early)


def test_a_step_without_its_rows_is_refused(store, shards):
    early = open_shard(store, 0, 0)
    sealed(store, shards)
    step = open_manifest(store, 0)
    assert check_shard(step.all(), early) == early.ids
    for given, found in ((step, "a SealedManifest"), (step.head, "no rows"), (None, "a NoneType")):
        with pytest.raises(TraceError, match=rf"sealed step: .*{found}, .*read_manifest"):
            check_shard(given, early)
    with pytest.raises(TraceError, match=r"shard: found a SealedManifest, expected a Manifest"):
        check_shard(step.all(), step)


def test_a_shard_without_samples_has_none_in_the_step(store, shards):
    write_shard(store, 0, 2, new_write_id(), [], GEOMETRY, R3)
    ids = [sorted(sample.id for sample in of) for of in shards] + [[]]
    manifest = seal(store, 0, 3, lambda shard: ids[shard], 0).all()
    assert check_shard(manifest, open_shard(store, 0, 2)) == []


def test_an_early_shard_has_the_policy_versions_of_its_sealed_step(store):
    """A response may contain tokens of several versions."""
    sample = make_samples(prompts=1, n=1)[0]
    G = len(sample.response_tokens_G)
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, G))
    write_shard(store, 0, 0, new_write_id(), [replace(sample, version_spans=spans)], GEOMETRY, R3)
    early = open_shard(store, 0, 0).policy_versions
    seal(store, 0, 1, lambda _: [sample.id], None)
    assert early == read_manifest(store, 0).policy_versions == (3, 4)


@pytest.mark.parametrize(("step", "shard"), [(0, "0"), (False, 0), (-1, 0), (0, 10**6)])
def test_malformed_numbers_of_shards_are_refused(store, step, shard):
    with pytest.raises(TraceError, match="expected"):
        open_shard(store, step, shard)


@pytest.mark.parametrize("name", ["routes_digest", "rows_valid", "segments"])
def test_samples_that_lack_a_column_of_their_routes_are_refused(store, monkeypatch, name):
    """Neither an early reader nor the seal accepts them. The other columns do not reveal this."""
    real = writer.sample_row
    monkeypatch.setattr(writer, "sample_row", lambda *given: {**real(*given), name: None})
    samples = make_samples(prompts=1)
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, R3)
    says = rf"samples.parquet: {name} is null in 2 of 2 samples, but .* has a geometry"
    with pytest.raises(TraceError, match=says):
        open_shard(store, 0, 0)
    with pytest.raises(TraceError, match=says):
        seal(store, 0, 1, lambda _: [sample.id for sample in samples], 0)
    assert store.size(keys.manifest(0)) is None


def test_numpy_integers_name_a_shard(store, shards):
    assert open_shard(store, np.int64(0), np.int32(1)).ids == open_shard(store, 0, 1).ids


@pytest.mark.parametrize("name", ["token_digest", "routes_digest"])
@pytest.mark.parametrize("value", ["x", "A" * 64])
def test_digests_that_are_not_sha256_are_refused(store, monkeypatch, name, value):
    real = writer.sample_row
    monkeypatch.setattr(writer, "sample_row", lambda *given: {**real(*given), name: value})
    write_shard(store, 0, 0, new_write_id(), make_samples(prompts=1), GEOMETRY, R3)
    with pytest.raises(TraceError, match=f"sample 000000/0/0: {name} is not a SHA-256 digest"):
        open_shard(store, 0, 0)
