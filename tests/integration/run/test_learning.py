"""Train the example with real engines: PPO and GSPO replay routes (R3), but GRPO does not."""

from pathlib import Path
from typing import Any

import pytest

import retrace
from pipeline.report.run_metrics import all_metrics, read_validation
from pipeline.run import keys
from pipeline.run.commit import read_commit
from pipeline.store import Store, open_store
from tests.exhaustive import TEST_ALL, sample_or_all
from tests.integration.run.conftest import Query
from tests.integration.run.retrace_runs import EXAMPLE, command, run, small

pytestmark = pytest.mark.integration

ACTOR = "actor_rollout_ref.actor"
PPO = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "actor_rollout_ref.rollout.n=1")
NATIVE = (f"{ACTOR}.router_replay.mode=disabled", "algorithm.rollout_correction.rollout_is=null")
GSPO = (
    f"{ACTOR}.policy_loss.loss_mode=gspo",
    f"{ACTOR}.clip_ratio_low=3e-4",
    f"{ACTOR}.clip_ratio_high=4e-4",
    "algorithm.rollout_correction.rollout_is=null",
)
GROUPS = (
    "data.train_batch_size=32",
    f"{ACTOR}.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=8",
)
SINGLE = ("data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=64")
ALGORITHMS = {"ppo": (PPO, SINGLE), "grpo": (NATIVE, GROUPS), "gspo-r3": (GSPO, GROUPS)}
"""The settings of each algorithm, and its sizes in a full run."""
STEPS = 8
WHOLE = (f"trainer.total_training_steps={STEPS}", "data.val_files=examples/addition/val.parquet")


@pytest.mark.parametrize("name", sample_or_all(["ppo"], list(ALGORITHMS)))
def test_an_algorithm_trains(tmp_path: Path, on_prefect_server: Query, name: str):
    """Each step changes the policy, and `verify` accepts the run.

    In the full run (make test-all), the validation reward after training is at least 0.1 higher
    than before it.
    """
    settings, sizes = ALGORITHMS[name]
    more = sample_or_all(settings, (*settings, *sizes, *WHOLE))
    run(*small(tmp_path, name, *more))
    uri = f"{tmp_path}/store/{name}"
    store = open_store(uri)
    steps = [step.values for step in all_metrics(store)]
    assert len(steps) == sample_or_all(2, STEPS)
    policies = [keys.policy(version) for version in range(len(steps) + 1)]
    assert len({read_commit(store, key)["weights_sha256"] for key in policies}) == len(policies)
    if name == "ppo":
        check_critic(steps)
        check_checkpoint(store, small(tmp_path, name, *more))
    command("traces", "verify", uri)
    if TEST_ALL:
        before, after = (read_validation(store, version) for version in (0, STEPS))
        assert before is not None
        assert after is not None
        assert after.reward - before.reward >= 0.1


def check_checkpoint(store: Store, settings: list[str]) -> None:
    """Check that the checkpoint contains both models and has about the estimated size."""
    sizes = {info.key: info.size for info in store.list(keys.checkpoints())}
    of_critic = sum(size for key, size in sizes.items() if "/critic-" in key)
    assert 0.4 < of_critic / sum(sizes.values()) < 0.6
    writes = retrace.check(EXAMPLE, settings).writes
    assert 0.7 < writes.checkpoint / sum(sizes.values()) < 1.1


def check_critic(steps: list[dict[str, Any]]) -> None:
    """Check that each step trains the critic, whose routers choose natively.

    Each prompt has one sample, so no group has variance.
    """
    for values in steps:
        assert values["reward/groups_without_variance"] == values["reward/groups"]
        assert values["critic/grad_norm"] > 0
        assert values["actor/grad_norm"] > 0
        assert (values["critic/skipped"], values["update/skipped"]) == (0, 0)
        assert values["critic/replay/coverage"] == 0
        assert values["critic/values/min"] < values["critic/values/max"]
    assert steps[0]["critic/values/mean"] != steps[1]["critic/values/mean"]
