"""A shard is written once and completely, or not at all."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from pipeline import threads
from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.store import StoreError
from pipeline.traces import (
    Routes,
    ShardWriter,
    TraceError,
    read_routes,
    read_samples,
    seal,
    write_shard,
)
from pipeline.traces.format.parquet import open_file
from pipeline.traces.write import files, rows
from pipeline.upkeep.verify import verify
from tests.memory_store import MemoryStore
from tests.samples import GEOMETRY, R3, equal, make_samples, same_sample


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
            pending = rows.ROUTES_ROWS * GEOMETRY.row_bytes
            assert writer.held_bytes <= memory_bytes + pending
        assert (writer.groups_split == 0) == (memory_bytes == 1 << 20)
        assert writer.commit().ours
    manifest = seal(store, 0, 1, lambda _: [s.id for s in samples], 0).all()
    found = read_routes(store, manifest, manifest.ids)
    assert all(equal(found[s.id], s.routes) for s in samples)
    assert all(map(same_sample, read_samples(store, manifest, [s.id for s in samples]), samples))


@pytest.mark.parametrize(("size", "expected"), [(3, [9, 9]), (4, [8, 8, 8]), (6, [6] * 6)])
def test_a_row_group_ends_with_a_group_unless_another_one_fits(
    store, small_row_groups, size, expected
):
    """Six groups of one sample each are written to row groups of at most 10 rows."""
    sets_TLK = np.zeros((size, len(GEOMETRY.layers), GEOMETRY.topk), GEOMETRY.dtype)
    writer = rows.RoutesWriter(store, "routes.parquet", {}, GEOMETRY, R3)
    with writer.file:
        for group in range(6):
            writer.add(str(group), Routes(sets_TLK, np.ones(size, np.bool_)), 0, size)
            writer.end_group()
        opened = open_file(store, writer.finish())
    assert np.diff(opened.first_rows).tolist() == expected


def test_the_first_of_two_writers_of_a_shard_wins(store):
    """The second commit is refused, and the first commit is returned. The second writer's files
    are debris that no manifest names, so readers see only the first writer's files."""
    first, second = make_samples(seed=1), make_samples(seed=2)
    ours = write_shard(store, 0, 0, "aaaaaaaa", first, GEOMETRY, R3)
    theirs = write_shard(store, 0, 0, "bbbbbbbb", second, GEOMETRY, R3)
    assert (ours.ours, theirs.ours) == (True, False)
    assert theirs.body == ours.body
    manifest = seal(store, 0, 1, lambda _: [s.id for s in first], 0).all()
    assert all("aaaaaaaa" in file.key for file in manifest.files)
    assert all(map(same_sample, read_samples(store, manifest, manifest.ids), first))


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


@pytest.mark.parametrize("cores", [1, 4])
def test_a_writer_is_unusable_after_an_error_of_the_store(monkeypatch, cores, small_row_groups):
    """A thread's error is raised in the caller. A shard that lacks some rows would be committed
    otherwise, and a commit is never replaced."""
    monkeypatch.setattr(threads, "core_count", lambda: cores)
    monkeypatch.setattr(files, "_MUCH", 0)
    store, samples = FailingOnce(), make_samples(prompts=4)
    with ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, 2) as writer:
        with pytest.raises(StoreError, match="the network is gone"):
            list(map(writer.add, samples))
        for call in (partial(writer.add, samples[-1]), writer.finish, writer.commit):
            with pytest.raises(TraceError, match="this writer failed"):
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


def test_after_a_failed_commit_the_shard_needs_a_new_writer():
    store, samples = LosesCommit(), make_samples(prompts=1)
    with ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, 1) as writer:
        writer.add(samples[0])
        with pytest.raises(StoreError, match="the network is gone"):
            writer.commit()
        for call in (partial(writer.add, samples[1]), writer.commit):
            with pytest.raises(TraceError, match="this writer failed"):
                call()
    assert write_shard(store, 0, 0, "0123abce", samples, GEOMETRY, R3).ours


def test_a_writer_that_is_used_in_the_wrong_order_or_with_wrong_sizes_is_refused(store):
    first, second = make_samples(prompts=1)
    with ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, 1) as writer:
        writer.add(first)
    with pytest.raises(TraceError, match="this writer was closed"):
        writer.commit()
    with ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, 1) as writer:
        writer.add(first)
        with pytest.raises(TraceError, match=f"duplicated: sample {first.id}"):
            writer.add(first)
        with pytest.raises(TraceError, match="maker"):
            writer.commit({"worker": object()})
        writer.add(second)
        assert list(store.list("")) == []
        writer.finish()
        with pytest.raises(TraceError, match="added after finish"):
            writer.add(replace(first, id="000000/0/7"))
    assert writer.commit().ours
    for sizes in ({"group_size": 0}, {"group_size": 1, "memory_bytes": -1}):
        with pytest.raises(TraceError, match=[*sizes][-1]):
            ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, **sizes)


def test_a_shard_of_a_step_sealed_without_it_is_not_committed(store):
    """A slow writer learns that no reader would find its samples. A second writer of a sealed shard
    loses as usual."""
    samples = make_samples(prompts=2)
    write_shard(store, 0, 0, new_write_id(), samples[:2], GEOMETRY, R3)
    seal(store, 0, 1, lambda _: [s.id for s in samples[:2]], 0)
    for shard in (1, 3):
        with pytest.raises(TraceError, match=rf"0000{shard}\.json .*already sealed"):
            write_shard(store, 0, shard, new_write_id(), samples[2:], GEOMETRY, R3)
        assert store.size(keys.rollout(0, shard)) is None
    assert not write_shard(store, 0, 0, new_write_id(), samples[2:], GEOMETRY, R3).ours
    assert not verify(store).problems
