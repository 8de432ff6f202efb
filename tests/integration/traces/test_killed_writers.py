"""Writers that are killed or race against each other: real processes on real stores."""

import io
import signal
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from pipeline.run import keys
from pipeline.run.commit import new_write_id, read_commit
from pipeline.store import ObjectMissingError, Store, open_store
from pipeline.traces import TraceError, read_manifest, read_routes, seal, write_shard
from pipeline.upkeep.problems import Report
from pipeline.upkeep.sweep import sweep
from pipeline.upkeep.verify import verify
from tests.integration.traces.writer import GEOMETRY, samples_of
from tests.paths import ROOT
from tests.samples import R3, by_shard, equal

pytestmark = pytest.mark.integration


def start(uri: str, shard: int, seed: int, kill_at: int = -1) -> subprocess.Popen[str]:
    """Start a writer process.

    Args:
        uri: The store's URI.
        shard: The shard that the process writes.
        seed: The seed for its samples.
        kill_at: The point at which the process kills itself; -1 for never.
    """
    command = [sys.executable, "-m", "tests.integration.traces.writer"]
    arguments = [uri, str(shard), str(seed), str(kill_at)]
    return subprocess.Popen(
        [*command, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, bool]:
    """Return how many points a writer passed, and whether its commit became the shard's commit."""
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    points, ours = out.split()
    return int(points), ours == "True"


def all_keys(store: Store) -> set[str]:
    return {info.key for info in store.list("")}


def named_keys(store: Store, *commits: str) -> set[str]:
    files = [file["key"] for key in commits for file in read_commit(store, key)["files"]]
    return {*commits, *files}


def swept(store: Store) -> int:
    """Remove all debris of any age, and return the number of removed objects."""
    report = Report(store.uri)
    count = len(list(sweep(store, 0.0, report)))
    assert not report.problems
    return count


def test_a_step_is_completed_after_a_kill_at_any_point(place):
    """At whichever point a writer is killed, a second writer completes the step.

    No incomplete shard is visible, and earlier commits stay. `verify` finds no problem, and sweep
    removes the debris.
    """
    other, small = samples_of(1, 1, G=40), samples_of(0, 2, G=40)
    ids = [sample.id for sample in (*other, *small)]
    points, ours = finish(start(f"{place}/calm", 0, 0))
    assert ours
    assert points >= 12
    left = 0
    for point in range(points):
        store = open_store(f"{place}/{point:03}")
        assert write_shard(store, 0, 1, new_write_id(), other, GEOMETRY, R3).ours
        before = {key: store.size(key) for key in all_keys(store)}
        process = start(store.uri, 0, 0, point)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL, errors

        assert {key: store.size(key) for key in before} == before
        committed = store.size(keys.rollout(0, 0)) is not None
        for key in all_keys(store) - set(before):
            if key.endswith(".parquet"):  # no object is an incomplete file
                pq.read_metadata(io.BytesIO(store.read(key)))
        assert not verify(store).problems
        if not committed:
            with pytest.raises((ObjectMissingError, TraceError)):
                seal(store, 0, 2, by_shard(ids, 2), 0)
        second = write_shard(store, 0, 0, new_write_id(), small, GEOMETRY, R3)
        assert second.ours != committed
        seal(store, 0, 2, by_shard(ids, 2), 0)
        assert not verify(store).problems
        left += swept(store) > 0
        commits = (keys.rollout(0, 0), keys.rollout(0, 1), keys.manifest(0))
        assert all_keys(store) == named_keys(store, *commits)
        assert not list(store.debris(""))
        assert not verify(store).problems
        for key in all_keys(store):
            store.delete(key)
    assert left >= points // 2


@pytest.mark.parametrize("writers", [2, 3])
def test_one_of_several_simultaneous_writers_wins(place, writers):
    """One writer wins, all writers succeed, and every reader sees all samples of the winner."""
    store = open_store(place)
    running = [start(place, 0, seed) for seed in range(writers)]
    won = [ours for _, ours in map(finish, running)]
    assert sorted(won) == [False] * (writers - 1) + [True]
    samples = samples_of(0, won.index(True))
    assert write_shard(store, 0, 1, new_write_id(), samples_of(1, 9, G=40), GEOMETRY, R3).ours
    ids = [sample.id for sample in (*samples, *samples_of(1, 9, G=40))]
    seal(store, 0, 2, by_shard(ids, 2), 0)
    routes = read_routes(store, read_manifest(store, 0), [sample.id for sample in samples])
    assert all(equal(routes[sample.id], sample.routes) for sample in samples)
    assert not verify(store).problems
    assert swept(store) == 2 * (writers - 1)
    assert not verify(store).problems
