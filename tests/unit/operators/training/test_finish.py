"""A trainer that repeats a step compares its policy with the stored policy.

An older release may have written the stored policy.
"""

import pytest

from operators.training.finish import _policy_digest, kl_coefficient
from operators.training.publish.publisher import compared
from pipeline.config.keys import with_value
from pipeline.config.tree import RunConfig
from pipeline.policies.versions import digests_of, policy_digest, publish_policy
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, commit, file_list, files_in, read_commit
from tests.memory_store import MemoryStore
from tests.weights import some_weights

NO_METRICS = {}


@pytest.fixture
def folder(tmp_path):
    """The folder of the trainer's exported weights."""
    (tmp_path / "model.safetensors").write_bytes(some_weights())
    return tmp_path


def publish_other(store, tmp_path) -> str:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model.safetensors").write_bytes(some_weights(1))
    publish_policy(store, 3, tmp_path / "other")
    return digests_of(tmp_path / "other").weights


def as_older_versions_wrote_it(store) -> str:
    files = files_in(read_commit(store, keys.policy(3)))
    store.delete(keys.policy(3))
    old = {"version": 3, "sha256": policy_digest(files), "files": file_list(files)}
    commit(store, keys.policy(3), old, "aa")
    return old["sha256"]


def test_a_deviating_policy_is_logged(folder, caplog):
    store = MemoryStore()
    theirs, ours = publish_other(store, folder), digests_of(folder).weights
    assert not compared(store, 3, theirs, theirs, NO_METRICS).drifted
    assert not caplog.text
    found = compared(store, 3, theirs, ours, NO_METRICS)
    assert (found.sha256, found.ours, found.drifted) == (theirs, ours, True)
    assert f"policy 3 has digest {theirs} in the store" in caplog.text


def test_policies_and_metrics_of_an_older_release_do_not_count_as_drift(folder, caplog):
    """Older objects contain a digest of files; the current release writes a digest of tensors."""
    store = MemoryStore()
    ours = digests_of(folder).weights
    publish_policy(store, 3, folder)
    of_files = as_older_versions_wrote_it(store)
    assert of_files != ours
    assert not compared(store, 3, of_files, ours, NO_METRICS).drifted
    assert not caplog.text


def test_a_deviating_policy_of_an_older_release_is_drift(folder, caplog):
    store = MemoryStore()
    theirs = publish_other(store, folder)
    of_files = as_older_versions_wrote_it(store)
    found = compared(store, 3, of_files, digests_of(folder).weights, NO_METRICS)
    assert (found.sha256, found.drifted) == (theirs, True)
    assert caplog.text.count("policy 3 has digest") == 1


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({}, "the field 'policy_sha256' is missing"),
        ({"policy_sha256": 3}, "3"),
        ({"policy_sha256": "a"}, "'a'"),
    ],
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


def test_the_kl_coefficient_is_the_one_that_the_previous_step_committed():
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
    with pytest.raises(
        CorruptObjectError, match=r"next_kl_coef.*the KL penalty in the reward of step 3"
    ):
        kl_coefficient(store, config_of_kl(type="adaptive"), 3)
