"""A trainer that trains a step again compares its policy with the stored one, whoever wrote it."""

import pytest

from operators.training.finish import _digests, _policy_digest, kl_coefficient
from pipeline.config.keys import with_value
from pipeline.config.tree import RunConfig
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, commit, file_list, files_in, read_commit
from pipeline.run.policy import digests_of, policy_digest, publish_policy
from tests.memory_store import MemoryStore
from tests.weights import some_weights


@pytest.fixture
def folder(tmp_path):
    """What the trainer has exported."""
    (tmp_path / "model.safetensors").write_bytes(some_weights())
    return tmp_path


def publish_other(store, tmp_path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model.safetensors").write_bytes(some_weights(1))
    publish_policy(store, 3, tmp_path / "other")


def as_older_versions_wrote_it(store) -> str:
    files = files_in(read_commit(store, keys.policy(3)))
    store.delete(keys.policy(3))
    old = {"version": 3, "sha256": policy_digest(files), "files": file_list(files)}
    commit(store, keys.policy(3), old, "aa")
    return old["sha256"]


def test_a_policy_that_is_missing_is_published(folder):
    store = MemoryStore()
    ours = digests_of(folder).weights
    assert _digests(store, folder, 3, None) == (ours, ours)
    assert read_commit(store, keys.policy(3))["weights_sha256"] == ours
    assert _digests(store, folder, 3, None) == (ours, ours)  # it is there now


def test_another_policy_is_left_and_told(folder, caplog):
    store = MemoryStore()
    publish_other(store, folder)
    theirs = digests_of(folder / "other").weights
    assert _digests(store, folder, 3, None) == (theirs, digests_of(folder).weights)
    assert f"policy 3 has digest {theirs} in the store" in caplog.text
    assert read_commit(store, keys.policy(3))["weights_sha256"] == theirs


def test_policies_and_metrics_of_an_older_version_are_no_drift(folder, caplog):
    """They have a digest of files where today stands one of tensors."""
    store = MemoryStore()
    ours = digests_of(folder).weights
    publish_policy(store, 3, folder)
    of_files = as_older_versions_wrote_it(store)
    assert of_files != ours
    assert _digests(store, folder, 3, None) == (ours, ours)
    assert _digests(store, folder, 3, of_files) == (ours, ours)
    assert _digests(store, folder, 3, ours) == (ours, ours)
    assert not caplog.text


def test_another_policy_of_an_older_version_is_drift(folder, caplog):
    store = MemoryStore()
    publish_other(store, folder)
    theirs = as_older_versions_wrote_it(store)
    for known in (None, theirs):
        assert _digests(store, folder, 3, known) == (theirs, digests_of(folder).weights)
    assert caplog.text.count("policy 3 has digest") == 2


@pytest.mark.parametrize(
    ("metrics", "found"),
    [({}, "it has no"), ({"policy_sha256": 3}, "3"), ({"policy_sha256": "a"}, "'a'")],
)
def test_metrics_without_the_policys_digest_are_corrupt(metrics, found):
    store = MemoryStore()
    assert _policy_digest(store, 2, {"policy_sha256": "0" * 64}) == "0" * 64
    said = rf"{keys.metrics(2)} in memory.*{found}.*the digest of policy 3"
    with pytest.raises(CorruptObjectError, match=said):
        _policy_digest(store, 2, metrics)


def config_of_kl(**kl_ctrl) -> RunConfig:
    return RunConfig.model_validate(
        {
            "actor_rollout_ref": {"model": {"path": "m"}},
            "algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.25, **kl_ctrl}},
            "trainer": {"experiment_name": "x"},
        }
    )


def test_the_kls_coefficient_is_what_the_step_before_has_committed():
    store = MemoryStore()
    adaptive = config_of_kl(type="adaptive")
    commit(store, keys.metrics(2), {"next_kl_coef": 0.1 + 0.2}, "aa")
    assert kl_coefficient(store, adaptive, 0) == 0.25
    assert kl_coefficient(store, adaptive, 3) == 0.1 + 0.2, "bit by bit"
    assert kl_coefficient(store, config_of_kl(), 3) == 0.25
    without = with_value(adaptive, "algorithm.use_kl_in_reward", False)
    assert kl_coefficient(store, without, 3) == 0


@pytest.mark.parametrize("body", [{}, {"next_kl_coef": None}, {"next_kl_coef": "0.1"}])
def test_metrics_without_the_next_coefficient_are_corrupt(body):
    store = MemoryStore()
    commit(store, keys.metrics(2), body, "aa")
    with pytest.raises(CorruptObjectError, match=r"next_kl_coef.*the KL in the reward of step 3"):
        kl_coefficient(store, config_of_kl(type="adaptive"), 3)
