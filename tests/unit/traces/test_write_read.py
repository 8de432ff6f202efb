"""Reading returns the samples and routes that were written."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.run.commit import new_write_id
from pipeline.traces import (
    Geometry,
    Provenance,
    Routes,
    TraceError,
    VersionSpan,
    read_manifest,
    read_routes,
    read_sample_file,
    read_samples,
    routes_digest,
    seal,
    token_digest,
    write_samples,
    write_shard,
)
from tests.samples import (
    GEOMETRY,
    R3,
    equal,
    make_samples,
    planned_ids,
    same_sample,
    without_routes,
)


@pytest.mark.parametrize("experts", [16, 256, 300])
def test_samples_and_routes_survive(store, experts, small_row_groups):
    """There are several shards and row groups. Results are in the requested order, whether all
    layers or only some are requested."""
    geometry = Geometry(experts, 4, (1, 2, 5))
    samples = make_samples(prompts=5, n=3, geometry=geometry)
    write_shard(store, 0, 0, new_write_id(), samples[:6], geometry, R3)
    write_shard(store, 0, 1, new_write_id(), samples[6:], geometry, R3)
    ids = [sample.id for sample in samples]
    manifest = seal(store, 0, 2, lambda shard: [ids[:6], ids[6:]][shard], 0).all()
    assert (manifest.geometry, manifest.provenance, manifest.ids) == (geometry, R3, sorted(ids))

    found = read_samples(store, manifest, ids[::-1])
    assert all(map(same_sample, found, samples[::-1]))
    routes = read_routes(store, manifest, ids)
    assert list(routes) == ids
    assert all(equal(routes[s.id], s.routes) for s in samples)

    some = read_routes(store, manifest, ids[3:5], [5, 1])
    assert list(some) == ids[3:5]
    for id in some:
        assert np.array_equal(some[id].sets_TLK, routes[id].sets_TLK[:, [2, 0]])

    rows = {row["id"]: row for row in manifest.rows.to_pylist()}
    for sample in samples:
        row = rows[sample.id]
        assert row["token_digest"] == token_digest(sample.tokens_S)
        assert row["routes_digest"] == routes_digest(sample.routes, geometry)
        assert row["rows_valid"] == sample.routes.valid_T.sum()
        assert row["rows_total"] == len(sample.tokens_S) - 1


def test_samples_without_routes_are_written_and_read(store):
    """With a dense model, or in a run that records no routes, there is no geometry and no routes
    file, and the columns for routes are null."""
    samples = without_routes(make_samples())
    write_shard(store, 0, 0, new_write_id(), samples, None, None)
    manifest = seal(store, 0, 1, lambda _: [sample.id for sample in samples], 0).all()
    assert manifest.geometry is None
    assert manifest.rows["routes"].null_count == manifest.rows["rows_valid"].null_count == 6
    assert all(map(same_sample, read_samples(store, manifest, manifest.ids), samples))
    with pytest.raises(TraceError, match="step 0: no routes in its samples"):
        read_routes(store, manifest, manifest.ids)


def test_an_empty_shard_is_a_shard(store):
    """If there are more shards than prompts, the last shards are empty and are joined like the
    others."""
    samples = make_samples()
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, R3)
    write_shard(store, 0, 1, new_write_id(), [], GEOMETRY, R3)
    manifest = seal(store, 0, 2, lambda shard: [] if shard else planned_ids(), 0).all()
    assert len(read_routes(store, manifest, manifest.ids)) == 6


def test_a_sample_of_one_token_has_no_rows(store):
    """With P = 1 and an abort before the first response token, S - 1 = 0 rows remain."""
    sample = make_samples(prompts=1, n=1)[0]
    nothing = Routes(np.empty((0, 3, 4), np.uint8), np.empty(0, np.bool_))
    sample = replace(
        sample,
        prompt_tokens_P=sample.prompt_tokens_P[:1],
        response_tokens_G=sample.response_tokens_G[:0],
        loss_mask_G=sample.loss_mask_G[:0],
        logprobs_G=sample.logprobs_G[:0],
        version_spans=(VersionSpan(0, 0, 0),),
        routes=nothing,
    )
    write_shard(store, 0, 0, new_write_id(), [sample], GEOMETRY, R3)
    manifest = seal(store, 0, 1, lambda _: [sample.id], 0).all()
    assert same_sample(read_samples(store, manifest, [sample.id])[0], sample)
    assert read_routes(store, manifest, [sample.id])[sample.id].sets_TLK.shape == (0, 3, 4)


def test_validation_samples_are_written_and_read(store):
    """A validation has no manifest."""
    samples = without_routes(make_samples())
    file = write_samples(store, "validations/000003/00000.aaaaaaaa.samples.parquet", samples)
    assert all(map(same_sample, read_sample_file(store, file), samples))


def test_the_provenance_is_read_as_written(store):
    samples = make_samples(version=7, step=8)
    made_by = Provenance("R3", 7, "vllm 0.32.0")
    write_shard(store, 8, 0, new_write_id(), samples, GEOMETRY, made_by)
    seal(store, 8, 1, lambda _: [s.id for s in samples], 7)
    manifest = read_manifest(store, 8)
    assert manifest.provenance == made_by
    assert manifest.policy_version == 7
    assert set(manifest.rows["policy_version"].to_pylist()) == {7}
