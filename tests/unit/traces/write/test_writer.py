"""A shard is written once and whole, or not at all."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pipeline.run.commit import new_write_id
from pipeline.traces import (
    Routes,
    ShardWriter,
    TraceError,
    VersionSpan,
    read_routes,
    read_samples,
    seal,
    write_shard,
)
from pipeline.traces.write import segments as segments_module
from tests.samples import (
    GEOMETRY,
    R3,
    equal,
    make_samples,
    same_sample,
)


@pytest.mark.parametrize("memory_bytes", [0, 400, 1 << 20])
def test_memory_decides_how_groups_lie_but_not_what_is_read(store, memory_bytes, small_row_groups):
    """Samples that come in turn from many groups are held until their group is whole, or the
    memory is full; either way the same routes are read."""
    samples = make_samples(prompts=5, n=4)
    in_turn = sorted(samples, key=lambda s: s.id.split("/")[2])
    with ShardWriter(store, 0, 0, new_write_id(), GEOMETRY, R3, 4, memory_bytes) as writer:
        for sample in in_turn:
            writer.add(sample)
            coded = segments_module.ROW_GROUP_TOKENS * len(GEOMETRY.layers) * GEOMETRY.topk
            assert writer.held_bytes <= memory_bytes + coded
        assert (writer.groups_split == 0) == (memory_bytes == 1 << 20)
        assert writer.commit().ours
    manifest = seal(store, 0, 1, lambda _: [s.id for s in samples], 0).all()
    found = read_routes(store, manifest, manifest.ids)
    assert all(equal(found[s.id], s.routes) for s in samples)
    assert all(map(same_sample, read_samples(store, manifest, [s.id for s in samples]), samples))


def test_a_writer_that_gives_up_leaves_nothing(store):
    """A sample that no reader would accept ends the shard: no commit, no file."""
    samples = make_samples()
    bad = replace(samples[1], loss_mask_G=samples[1].loss_mask_G[:-1])
    with pytest.raises(TraceError, match=bad.id):
        write_shard(store, 0, 0, new_write_id(), [samples[0], bad], GEOMETRY, R3)
    assert list(store.list("")) == []


def test_two_writers_of_one_shard(store):
    """The second one's commit is refused and shows the first one's; its files are debris that no
    manifest names; what is read is the first one's alone."""
    first, second = make_samples(seed=1), make_samples(seed=2)
    ours = write_shard(store, 0, 0, "aaaaaaaa", first, GEOMETRY, R3)
    theirs = write_shard(store, 0, 0, "bbbbbbbb", second, GEOMETRY, R3)
    assert ours.ours
    assert not theirs.ours
    assert theirs.body == ours.body
    manifest = seal(store, 0, 1, lambda _: [s.id for s in first], 0).all()
    assert all("aaaaaaaa" in ref.key for ref in manifest.files)
    assert all(map(same_sample, read_samples(store, manifest, manifest.ids), first))


def bad_samples() -> Iterator[tuple[object, str]]:
    sample = make_samples(prompts=1, n=1)[0]
    G = len(sample.response_tokens_G)
    routes = sample.routes
    yield replace(sample, routes=None), "no routes"
    longer = Routes(np.concatenate([routes.sets_TLK] * 2), np.concatenate([routes.valid_T] * 2))
    yield replace(sample, routes=longer), "one row per token but the last"
    yield replace(sample, logprobs_G=sample.logprobs_G[1:]), f"{G - 1} values of logprobs_G"
    yield replace(sample, version_spans=()), "version spans"
    yield replace(sample, version_spans=(VersionSpan(0, 0, G + 1),)), "version spans"
    yield replace(sample, extras={"score": float("nan")}), "extras: nan, expected finite numbers"
    yield replace(sample, extras={"score": object()}), "of type object is not JSON"
    yield replace(sample, prompt_tokens_P=sample.prompt_tokens_P[:0]), "no prompt token"


@pytest.mark.parametrize(("sample", "says"), list(bad_samples()))
def test_samples_that_do_not_fit_together_are_refused(store, sample, says):
    """With the sample's id, and before anything is committed."""
    with pytest.raises(TraceError, match=f"sample 000000/0/0: .*{says}"):
        write_shard(store, 0, 0, new_write_id(), [sample], GEOMETRY, R3)
    assert store.size("steps/000000/rollout/00000.json") is None


def test_contradictions_of_a_shard_are_refused(store):
    samples = make_samples()
    with pytest.raises(TraceError, match="geometry and provenance go together"):
        write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, None)
    with pytest.raises(TraceError, match="it has routes, but its shard has no geometry"):
        write_shard(store, 0, 0, new_write_id(), samples, None, None)
    with pytest.raises(TraceError, match="there twice: 000000/0/1"):
        write_shard(store, 0, 0, new_write_id(), [*samples, samples[1]], GEOMETRY, R3)
