"""Training with a store at 1 MB/s, or with a server that is down for 20 s during each transfer.

The process groups time out after 5 s, so that a transfer within a pass would fail.
"""

from contextlib import closing
from pathlib import Path

import pytest

from pipeline.policies.cache import PolicyCache
from pipeline.policies.fetch import fetch_policy
from pipeline.policies.prefetch import Prefetch
from pipeline.policies.versions import chain
from pipeline.run import keys
from pipeline.run.commit import files_in, read_commit, sha256
from pipeline.store import Store, open_store
from tests.attempts import make_attempt
from tests.away import Away
from tests.exhaustive import TEST_ALL
from tests.integration.torchrun import run_ranks
from tests.integration.training_replay.sealed import config_of, make_run
from tests.minio import Minio, minio, new_place, s3_uri, start_minio, use
from tests.patience import PATIENCE_S, eventually
from tests.proxy import start_proxy
from tests.tiny_models import make_tiny
from tests.weights import digest_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not TEST_ALL, reason="waits for minutes: make test-all"),
]
__all__ = ["minio", "s3_uri"]
LIMIT_S = 5
RATE = 1_000_000  # bytes per second
PROGRAM = "tests.integration.training_replay.limited"
AWAY_S = 20
TRANSFERS = {
    "policy download": ("GET ", "/inputs/"),  # policy 0 is the staged model
    "policy download by a worker": ("GET ", "/policies/000002/"),
    "policy upload": ("PUT ", "/policies/000001/"),
    "checkpoint upload": ("PUT ", "/checkpoints/000001/"),
    "checkpoint download": ("GET ", "/checkpoints/000001/"),
}
"""For each transfer: the beginning of its first large request, and a part of its path."""
LAYOUTS = {"dp2": {}, "tp2": {"tensor_model_parallel_size": 2}}


def train(
    store: Store, attempt: int, steps: int, save_freq: int = 1, differences: bool | None = None
) -> str:
    """Run an attempt of two ranks to completion, and return the output.

    Args:
        store: The run's store.
        attempt: The attempt's number.
        steps: The step at which the attempt ends.
        save_freq: The number of steps between checkpoints.
        differences: Whether policies are written as differences; None for the default.
    """
    make_attempt(store, attempt, steps=steps, save_freq=save_freq, differences=differences)
    return run_ranks(PROGRAM, 2, "--run-uri", store.uri, "--attempt", str(attempt))


def size_of(store: Store, key: str) -> int:
    return sum(file.size for file in files_in(read_commit(store, key)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slow_transfers_do_not_end_a_step(
    tmp_path: Path, minio: Minio, s3_uri: str, monkeypatch: pytest.MonkeyPatch, layout: str
):
    """Transfers may take longer than the time limit of a pass, and do not change the results.

    The first attempt downloads the model, and uploads routes, a policy and a checkpoint. The second
    attempt downloads the checkpoint. Policies are the same as with a fast store.
    """
    monkeypatch.setenv("LIMIT_S", str(LIMIT_S))
    model = make_tiny(tmp_path / "model", "qwen3_moe", moe_intermediate_size=128)
    config = config_of(router_replay={"mode": "R2"}, megatron=LAYOUTS[layout])
    slow, fast = (make_run(f"{s3_uri}/{name}", model, config, steps=2) for name in ("slow", "fast"))
    train(fast, 0, steps=2)
    with start_proxy(minio.port) as proxy:
        proxy.rate = RATE
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        train(slow, 0, steps=1)
        output = train(slow, 1, steps=2)
    assert "continue from the checkpoint of policy 1" in output
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", minio.url)
    slow = open_store(slow.uri)
    for version in (1, 2):
        one, other = (read_commit(store, keys.policy(version)) for store in (slow, fast))
        assert one["weights_sha256"] == other["weights_sha256"]
        for key in (keys.policy(version), keys.checkpoint(version)):
            assert size_of(slow, key) > 1.2 * LIMIT_S * RATE, f"{key} is too small for this test"


def test_differences_from_a_slow_store_lead_to_the_same_weights(
    tmp_path: Path, minio: Minio, s3_uri: str, monkeypatch: pytest.MonkeyPatch
):
    """The trainer writes a whole version and a difference, and a worker holds both in order.

    A second attempt continues from the checkpoint of policy 2 and writes policy 3 whole, because it
    does not have the state of the first attempt. Transfers of each kind take longer than the time
    limit of a pass.
    """
    monkeypatch.setenv("LIMIT_S", str(LIMIT_S))
    model = make_tiny(tmp_path / "model", "qwen3_moe", moe_intermediate_size=320)
    # At this learning rate, a difference takes less than half of a policy's bytes.
    config = config_of(router_replay={"mode": "R2"}, optim={"lr": 1e-6})
    slow, fast = (make_run(f"{s3_uri}/{name}", model, config, steps=3) for name in ("slow", "fast"))
    train(fast, 0, steps=3)
    held = {}
    with start_proxy(minio.port) as proxy:
        proxy.rate = RATE
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        train(slow, 0, steps=2, save_freq=2, differences=True)
        with closing(PolicyCache(open_store(slow.uri), tmp_path)) as cache:
            for version in (1, 2):
                held[version] = digest_held(cache, version)
            output = train(slow, 1, steps=3, save_freq=2, differences=True)
            held[3] = digest_held(cache, 3)
    assert "continue from the checkpoint of policy 2" in output
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", minio.url)
    slow = open_store(slow.uri)
    for version in (1, 2, 3):
        commit = read_commit(fast, keys.policy(version))
        assert held[version] == commit["weights_sha256"]
    assert [len(chain(slow, version)) for version in (1, 2, 3)] == [1, 2, 1]
    for key in (keys.policy(1), keys.policy(2), keys.policy(3), keys.checkpoint(2)):
        assert size_of(slow, key) > 1.1 * LIMIT_S * RATE, f"{key} is too small for this test"


def digest_held(cache: PolicyCache, version: int) -> str:
    """Hold a version as a worker does, and return the digest of the weights in its folder."""
    with cache.held(version) as held:
        found = digest_of(held.folder)
        assert found == held.weights
    cache.loaded(version)
    return found


def test_a_store_that_is_away_in_each_transfer_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The server is killed in each transfer and starts again after 20 s.

    This happens four times in two attempts, and once while a rollout worker prefetches a policy.
    The ranks continue without a restart, and write the same policies as undisturbed ranks.
    """
    model = make_tiny(tmp_path / "model", "qwen3_moe", moe_intermediate_size=128)
    config = config_of(router_replay={"mode": "R2"})
    monkeypatch.setenv("LIMIT_S", str(PATIENCE_S))
    with start_minio(tmp_path) as server, start_proxy(server.port) as proxy:
        use(server, monkeypatch)
        place = new_place()
        disturbed, other = (
            make_run(f"{place}/{name}", model, config, steps=2) for name in ("disturbed", "other")
        )
        train(other, 0, steps=2)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        with closing(Away(server, AWAY_S, TRANSFERS)) as away:
            proxy.change, proxy.rate = away, 4 * RATE
            output = train(disturbed, 0, steps=1)
            output += train(disturbed, 1, steps=2)
            with (
                closing(PolicyCache(open_store(disturbed.uri), tmp_path)) as cache,
                closing(Prefetch(open_store(disturbed.uri), cache)) as prefetch,
            ):
                prefetch.fetch(2)
                eventually(lambda: len(away.times_s) == len(TRANSFERS), lambda: away.times_s)
                with cache.held(2) as held:
                    fetched = held.weights
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)

        assert away.times_s.keys() == TRANSFERS.keys(), away.times_s
        assert min(away.times_s.values()) >= AWAY_S
        assert output.count(": answered on try ") >= len(TRANSFERS) - 1
        assert "continue from the checkpoint of policy 1" in output
        disturbed, other = open_store(disturbed.uri), open_store(other.uri)
        for version in (1, 2):
            digests = [
                fetch_policy(store, version, tmp_path / store.uri[-5:] / str(version))
                for store in (disturbed, other)
            ]
            assert digests[0] == digests[1]
            assert version == 1 or fetched == digests[1]
            for file in files_in(read_commit(disturbed, keys.checkpoint(version))):
                assert sha256(disturbed.read(file.key)) == file.sha256
        for step in (0, 1):
            metrics = read_commit(disturbed, keys.metrics(step))["metrics"]
            assert metrics["resume/policy_drift"] == metrics["resume/routes_drift"] == 0
