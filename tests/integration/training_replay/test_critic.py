"""The program of a training rank with a critic: warm-up, offload, kill -9 and resume."""

from pathlib import Path

import pytest

from pipeline.config.keys import with_value
from pipeline.run import keys
from pipeline.run.commit import find_commit, read_commit
from tests.attempts import make_attempt
from tests.integration.torchrun import start_ranks
from tests.integration.training_replay.sealed import config_of, make_run
from tests.integration.training_replay.test_training_loop import (
    MEGATRON,
    PROGRAM,
    await_object,
    metrics_of,
    ranks_of,
    train,
)
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.integration

STEPS = 3


def test_killing_a_rank_with_a_critic_changes_nothing(tmp_path: Path, tiny_model: Path):
    """A killed run ends with the policy and critic metrics of an undisturbed run, bit by bit.

    Both runs train two ranks for three steps, with a checkpoint after each. They use R2, whose
    routes the critic replays. Step 0 trains only the critic, so policy 1 equals policy 0. One run
    is killed right after the checkpoint of policy 2 is committed, and continues from it. That run
    also offloads all state between passes. The critic has its own mini-batches and epochs, and its
    learning rate changes in each step.
    """
    config = config_of(
        router_replay={"mode": "R2"},
        algorithm={"adv_estimator": "gae", "lam": 0.95},
        trainer={"critic_warmup": 1},
        use_kl_loss=True,
    )
    schedule = {"lr": 1e-2, "lr_decay_style": "linear", "lr_decay_steps": 4, "min_lr": 1e-3}
    for key, value in schedule.items():
        config = with_value(config, f"critic.optim.{key}", value)
    for key, value in (("ppo_mini_batch_size", 1), ("ppo_epochs", 2), ("replay_routes", True)):
        config = with_value(config, f"critic.{key}", value)
    offloaded = config
    for what in ("param", "grad", "optimizer"):
        offloaded = with_value(offloaded, f"{MEGATRON}.{what}_offload", True)
    calm, killed = (
        make_run(tmp_path / name, tiny_model, settings, STEPS)
        for name, settings in (("calm", config), ("killed", offloaded))
    )
    for store in (calm, killed):
        make_attempt(store, 0, steps=STEPS, save_freq=1)
    train(calm, ranks=2)

    process = start_ranks(PROGRAM, 2, "--run-uri", killed.uri, "--attempt", "0")
    await_object(killed, keys.checkpoint(2), process)
    ranks_of(process)[1].kill()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert find_commit(killed, keys.metrics(2)) is None, output[-3000:]
    make_attempt(killed, 1, steps=STEPS, save_freq=1)
    assert "continue from the checkpoint of policy 2" in train(killed, ranks=2, attempt=1)

    for store in (calm, killed):
        digests = [
            read_commit(store, keys.policy(version))["weights_sha256"] for version in range(4)
        ]
        assert digests[0] == digests[1], "step 0 trains only the critic"
        assert len(set(digests)) == 3
    same = [metrics_of(store, 2) for store in (calm, killed)]
    assert read_commit(killed, keys.policy(3))["weights_sha256"] == digests[3]
    names = [name for name in same[0] if name.startswith(("critic/", "actor/"))]
    assert {"critic/vf_loss", "critic/values/mean", "actor/grad_norm"} <= {*names}
    for name in names:
        assert same[0][name] == same[1][name], name
    first, second, third = (metrics_of(calm, step) for step in range(STEPS))
    assert (first["actor/lr"], first["actor/pg_loss"], second["actor/lr"]) == (0, None, 1e-3)
    rates = [step["critic/lr"] for step in (first, second, third)]
    assert rates == pytest.approx([1e-2, 7.75e-3, 5.5e-3])
    assert first["critic/replay/coverage"] == third["critic/replay/coverage"] == 1
    assert first["critic/replay/agreement"] > 0.999, "the critic begins with the policy's weights"
    assert third["critic/replay/agreement"] < first["critic/replay/agreement"]
    assert first["critic/values/mean"] != third["critic/values/mean"]
