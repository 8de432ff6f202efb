"""A shard is written once and completely, or not at all."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.store import ObjectExistsError, StoreError
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
from pipeline.upkeep.verify import verify
from tests.memory_store import MemoryStore
from tests.samples import (
    GEOMETRY,
    R3,
    equal,
    make_samples,
    same_sample,
)


@pytest.mark.parametrize("memory_bytes", [0, 400, 1 << 20])
def test_memory_affects_the_place_of_groups_but_not_the_result(
    store, memory_bytes, small_row_groups
):
    """Samples alternate between many groups. The writer holds them until their group is complete
    or memory is full. The same routes are read in both cases."""
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


def test_a_failed_writer_leaves_no_object(store):
    """If a reader would refuse a sample, the shard has no commit and no file."""
    samples = make_samples()
    bad = replace(samples[1], loss_mask_G=samples[1].loss_mask_G[:-1])
    with pytest.raises(TraceError, match=bad.id):
        write_shard(store, 0, 0, new_write_id(), [samples[0], bad], GEOMETRY, R3)
    assert list(store.list("")) == []


def test_the_first_of_two_writers_of_a_shard_wins(store):
    """The second commit is refused, and the first commit is returned. The second writer's files
    are debris that no manifest names, so readers see only the first writer's files."""
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
    yield replace(sample, routes=longer), "one row per token except the last"
    yield replace(sample, logprobs_G=sample.logprobs_G[1:]), f"{G - 1} values of logprobs_G"
    yield replace(sample, version_spans=()), "version spans"
    yield replace(sample, version_spans=(VersionSpan(0, 0, G + 1),)), "version spans"
    yield (
        replace(sample, extras={"score": float("nan")}),
        "extras: key score: nan, expected finite numbers",
    )
    yield replace(sample, extras={"score": object()}), "of type object is not JSON"
    yield replace(sample, prompt_tokens_P=sample.prompt_tokens_P[:0]), "no prompt token"


@pytest.mark.parametrize(("sample", "says"), list(bad_samples()))
def test_samples_that_do_not_fit_together_are_refused(store, sample, says):
    """The message contains the sample's id, and the shard is not committed."""
    with pytest.raises(TraceError, match=f"sample 000000/0/0: .*{says}"):
        write_shard(store, 0, 0, new_write_id(), [sample], GEOMETRY, R3)
    assert store.size("steps/000000/rollout/00000.json") is None


def test_contradictory_arguments_of_a_shard_are_refused(store):
    samples = make_samples()
    with pytest.raises(TraceError, match="only one of geometry and provenance"):
        write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, None)
    with pytest.raises(TraceError, match="routes in a shard without geometry"):
        write_shard(store, 0, 0, new_write_id(), samples, None, None)
    with pytest.raises(TraceError, match="duplicated: 000000/0/1"):
        write_shard(store, 0, 0, new_write_id(), [*samples, samples[1]], GEOMETRY, R3)


def test_a_writer_does_not_depend_on_validity_that_changes_later(store):
    """Engines may use one array for all responses."""
    samples = make_samples(prompts=1)
    valid_T = np.ones(len(samples[0].routes.valid_T), bool)
    with ShardWriter(store, 0, 0, new_write_id(), GEOMETRY, R3, 2) as writer:
        writer.add(replace(samples[0], routes=Routes(samples[0].routes.sets_TLK, valid_T)))
        valid_T[:] = False
        writer.add(samples[1])
        writer.commit()
    manifest = seal(store, 0, 1, lambda _: [s.id for s in samples], 0).all()
    assert read_routes(store, manifest, manifest.ids)[samples[0].id].valid_T.all()


class FailingOnce(MemoryStore):
    """A store in which one write to a routes file fails."""

    failed = False

    def upload(self, key):
        opened, store = super().upload(key), self
        whole = opened.write

        def write(data):
            if key.endswith(".routes.parquet") and data[:4] != b"PAR1" and not store.failed:
                store.failed = True
                raise StoreError(f"write {key}: the network is gone")
            return whole(data)

        opened.write = write
        return opened


@pytest.mark.parametrize("group_size", [1, 2])
def test_a_writer_is_unusable_after_an_error_of_the_store(group_size, small_row_groups):
    """A shard that lacks some rows would be committed otherwise, and a commit is never replaced."""
    store = FailingOnce()
    samples = make_samples(prompts=4)
    with ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, group_size) as writer:
        with pytest.raises(StoreError, match="the network is gone"):
            list(map(writer.add, samples))
        for call in (partial(writer.add, samples[-1]), writer.finish, writer.commit):
            with pytest.raises(
                TraceError, match=r"00000\.json: this writer failed; write the shard"
            ):
                call()
    assert list(store.list("")) == []


class LosesCommit(MemoryStore):
    """A store in which the first creation of a commit fails."""

    failed = False

    def create(self, key, data):
        if key.endswith(".json") and not self.failed:
            self.failed = True
            raise StoreError(f"create {key}: the network is gone")
        super().create(key, data)


def test_a_writer_is_unusable_after_a_failed_commit():
    store, (first, second) = LosesCommit(), make_samples(prompts=1)
    with ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, 1) as writer:
        writer.add(first)
        with pytest.raises(StoreError, match="the network is gone"):
            writer.commit()
        for call in (partial(writer.add, first), partial(writer.add, second), writer.commit):
            with pytest.raises(TraceError, match="this writer failed; write the shard again"):
                call()


def test_a_used_write_id_is_refused_with_the_fix():
    """A writer that ended before its commit leaves files under its write id."""
    store, samples = LosesCommit(), make_samples()
    with pytest.raises(StoreError, match="the network is gone"):
        write_shard(store, 0, 0, "0123abcd", samples, GEOMETRY, R3)
    with pytest.raises(ObjectExistsError, match=r"0123abcd.*write again under a new one \(new_wri"):
        write_shard(store, 0, 0, "0123abcd", samples, GEOMETRY, R3)
    assert write_shard(store, 0, 0, "0123abce", samples, GEOMETRY, R3).ours


def test_a_finished_writer_can_be_committed_after_its_block(store):
    with ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, 1) as writer:
        writer.add(make_samples()[0])
        writer.finish()
    assert writer.commit().ours


def test_a_shard_of_a_step_sealed_without_it_is_not_committed(store):
    """A slow writer learns that no reader would find its samples. A second writer of a sealed shard
    loses as usual."""
    samples = make_samples(prompts=2)
    write_shard(store, 0, 0, new_write_id(), samples[:2], GEOMETRY, R3)
    seal(store, 0, 1, lambda _: [s.id for s in samples[:2]], 0)
    for shard in (1, 3):
        with pytest.raises(
            TraceError, match=rf"0000{shard}\.json in .*: the step is already sealed"
        ):
            write_shard(store, 0, shard, new_write_id(), samples[2:], GEOMETRY, R3)
        assert store.size(keys.rollout(0, shard)) is None
    assert not write_shard(store, 0, 0, new_write_id(), samples[2:], GEOMETRY, R3).ours
    assert not verify(store).problems


def test_a_closed_writer_is_unusable(store):
    with ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, 1) as writer:
        writer.add(make_samples()[0])
    with pytest.raises(TraceError, match="this writer was closed; write the shard again"):
        writer.commit()


def test_a_refused_sample_leaves_the_writer_usable(store):
    samples = make_samples(prompts=1)
    with ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, 2) as writer:
        writer.add(samples[0])
        with pytest.raises(TraceError, match="duplicated"):
            writer.add(samples[0])
        writer.add(samples[1])
        assert writer.commit().ours
