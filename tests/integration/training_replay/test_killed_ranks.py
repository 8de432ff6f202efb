"""Killing a rank while it writes any object of a policy or checkpoint changes no result."""

import shutil
from pathlib import Path

import pytest

from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import chain
from pipeline.run import keys
from pipeline.run.commit import files_in, read_commit
from pipeline.run.restarts import restarts
from pipeline.store import Store, open_store
from tests.attempts import make_attempt
from tests.exhaustive import sample_or_all
from tests.integration.torchrun import run_killed
from tests.integration.training_replay.sealed import config_of, make_run
from tests.integration.training_replay.test_training_loop import train
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.integration
PROGRAM = "tests.integration.training_replay.killed"
STEPS = 3
OF_RANK_0 = (".metadata", "weights", "common.pt", "metadata.json", "optimizer", "share", "commit")
OF_RANK_1 = ("weights", "optimizer", "share")
CASES = [(rank, made) for rank, of in enumerate((OF_RANK_0, OF_RANK_1)) for made in range(len(of))]
"""The killed rank, and how many objects it writes before the kill."""


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run of two ranks with sealed steps, and train a copy without interruption.

    At this learning rate, a difference takes less than half of a policy's bytes.
    """
    folder = tmp_path_factory.mktemp("killed")
    config = config_of(router_replay={"mode": "R3"}, optim={"lr": 1e-6})
    make_run(folder / "sealed", tiny_model, config, STEPS)
    shutil.copytree(folder / "sealed", folder / "calm")
    calm = open_store(str(folder / "calm"))
    make_attempt(calm, 0, steps=STEPS, save_freq=1)
    train(calm, ranks=2)
    return folder


def copied(runs: Path, folder: Path) -> Store:
    """Copy the untrained run with sealed steps, and return its store."""
    shutil.copytree(runs / "sealed", folder / "run")
    return open_store(str(folder / "run"))


def run_until(store: Store, commit: str, rank: int, made: int) -> str:
    """Run attempt 0 until a rank is killed, and return the output.

    Args:
        store: The run's store.
        commit: The key of a commit; the rank's objects are in its folder.
        rank: The rank that is killed.
        made: The number of objects that the rank writes before the kill.
    """
    arguments = (str(rank), commit.rpartition("/")[0], str(made))
    return run_killed(
        PROGRAM, 2, *arguments, "--run-uri", store.uri, "--attempt", "0", timeout_s=PATIENCE_S
    )


def digests(store: Store) -> list[str]:
    versions = range(1, STEPS + 1)
    return [read_commit(store, keys.policy(version))["weights_sha256"] for version in versions]


def written(store: Store, commit: str) -> list[int]:
    """Return the number of objects that each rank wrote for a policy or checkpoint.

    The shares list all objects in the commit's folder except for themselves and the commit.
    """
    found = [info.key for info in store.list(commit.rpartition("/")[0] + "/")]
    shares = sorted(key for key in found if "/share-" in key)
    of_ranks = [len(files_in(read_commit(store, share))) + 1 for share in shares]
    of_ranks[0] += 1  # the commit
    assert sum(of_ranks) == len(found), found
    return of_ranks


POLICY_OF_RANK_0 = ("weights", *[f"file {i}" for i in range(5)], "index", "share", "commit")
POLICY_OF_RANK_1 = ("weights", "share")
POLICIES = [
    (rank, made)
    for rank, of in enumerate((POLICY_OF_RANK_0, POLICY_OF_RANK_1))
    for made in range(len(of))
]
"""Cases for a whole policy version."""


def test_the_cases_are_all_objects(runs: Path):
    calm = open_store(str(runs / "calm"))
    assert written(calm, keys.policy(2)) == [len(POLICY_OF_RANK_0), len(POLICY_OF_RANK_1)]
    assert written(calm, keys.checkpoint(2)) == [len(OF_RANK_0), len(OF_RANK_1)]


@pytest.mark.parametrize(("rank", "made"), sample_or_all([(0, 8), (1, 1)], POLICIES))
def test_a_rank_may_be_killed_at_any_object_of_a_policy(
    runs: Path, tmp_path: Path, rank: int, made: int
):
    """The version is not visible, because rank 0 commits it only after all shares.

    The next attempt writes it, and all policies equal those of the undisturbed run. Each commit
    lists files from only one attempt, and all of these files exist.
    """
    store = copied(runs, tmp_path)
    make_attempt(store, 0, steps=STEPS, save_freq=1)
    run_until(store, keys.policy(2), rank, made)
    assert store.size(keys.policy(2)) is None
    assert store.size(keys.metrics(1)) is None
    make_attempt(store, 1, steps=STEPS, save_freq=1)
    train(store, ranks=2, attempt=1)
    assert digests(store) == digests(open_store(str(runs / "calm")))
    for version in range(1, STEPS + 1):
        files = files_in(read_commit(store, keys.policy(version)))
        assert {store.size(file.key) == file.size for file in files} == {True}
        assert len({file.key.rsplit("/", 2)[1] for file in files}) == 1


OF_DIFFERENCE = (3, 2)
"""Number of objects from each rank: its file and its share, and from rank 0 also the commit."""
DIFFERENCES = [(rank, made) for rank, of in enumerate(OF_DIFFERENCE) for made in range(of)]
"""Cases for a difference."""


@pytest.mark.parametrize(("rank", "made"), sample_or_all([(1, 1)], DIFFERENCES))
def test_a_rank_may_be_killed_at_any_object_of_a_difference(
    runs: Path, tmp_path: Path, rank: int, made: int
):
    """The next attempt writes a whole version, because it does not have the last attempt's state.

    The following version is a difference from this one, not from files of the killed ranks.
    """
    store = copied(runs, tmp_path)
    make_attempt(store, 0, steps=STEPS, save_freq=1, differences=True)
    run_until(store, keys.policy(2), rank, made)
    left = [info.key for info in store.list(keys.policy(2).rpartition("/")[0])]
    assert len(left) >= made
    assert [key for key in left if "/model" in key] == []
    assert store.size(keys.policy(2)) is None
    make_attempt(store, 1, steps=STEPS, save_freq=1, differences=True)
    train(store, ranks=2, attempt=1)
    assert digests(store) == digests(open_store(str(runs / "calm")))
    assert [len(chain(store, version)) for version in range(1, STEPS + 1)] == [1, 1, 2]
    assert written(store, keys.policy(STEPS)) == [*OF_DIFFERENCE], "the cases are all objects"
    assert fetch_policy(store, STEPS, tmp_path / "fetched") == digests(store)[-1]


@pytest.mark.parametrize(("rank", "made"), sample_or_all([(0, 6), (1, 2)], CASES))
def test_a_rank_may_be_killed_at_any_object_of_a_checkpoint(
    runs: Path, tmp_path: Path, rank: int, made: int
):
    """The checkpoint is not used, because rank 0 commits it only after all shares.

    The next attempt continues from the previous checkpoint, and all policies equal those of the
    undisturbed run. Each checkpoint's commit lists files from only one attempt, and all of these
    files exist.
    """
    store = copied(runs, tmp_path)
    make_attempt(store, 0, steps=STEPS, save_freq=1)
    output = run_until(store, keys.checkpoint(2), rank, made)
    assert restarts(store) == [1], output[-3000:]
    make_attempt(store, 1, steps=STEPS, save_freq=1)
    assert "continue from the checkpoint of policy 1" in train(store, ranks=2, attempt=1)
    assert digests(store) == digests(open_store(str(runs / "calm")))
    assert restarts(store)[-1] == STEPS
    for version in restarts(store):
        files = files_in(read_commit(store, keys.checkpoint(version)))
        assert {store.size(file.key) == file.size for file in files} == {True}
        assert len({file.key.rsplit("/", 2)[1] for file in files}) == 1
