"""What a trainer that repeats or continues a step reads from the store."""

import pytest

from operators.training.finish import _policy_digest, kl_coefficient
from operators.training.publish.publisher import compared
from pipeline.config.keys import with_value
from pipeline.config.tree import RunConfig
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, commit
from tests.memory_store import MemoryStore


def test_a_deviating_policy_is_logged(caplog):
    theirs, ours = "1" * 64, "2" * 64
    assert not compared(3, theirs, theirs, {}).drifted
    assert not caplog.text
    found = compared(3, theirs, ours, {})
    assert (found.sha256, found.ours, found.drifted) == (theirs, ours, True)
    assert f"policy 3 has digest {theirs}" in caplog.text


@pytest.mark.parametrize("metrics", [{}, {"policy_sha256": "a"}])
def test_metrics_without_the_policys_digest_are_corrupt(metrics):
    assert _policy_digest(MemoryStore(), 2, {"policy_sha256": "0" * 64}) == "0" * 64
    with pytest.raises(CorruptObjectError, match=f"{keys.metrics(2)}.*policy_sha256"):
        _policy_digest(MemoryStore(), 2, metrics)


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
    commit(store, keys.metrics(3), {"next_kl_coef": None}, "aa")
    with pytest.raises(CorruptObjectError, match="next_kl_coef"):
        kl_coefficient(store, adaptive, 4)
