"""The program of a training rank, from sealed steps in a file store to policies and metrics.

The engine is transformers in float32 (sealed.py). With the same weights, the trainer must compute
the engine's log-probs, and its routers must make the same choices as the engine's.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.config.keys import with_value
from pipeline.metrics.metric import layers_of
from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import refer_policy
from pipeline.run import keys
from pipeline.run.commit import commit, files_in, find_commit, new_write_id, read_commit
from pipeline.store import Store
from pipeline.traces import read_manifest, read_routes, used_routes
from pipeline.traces.read.trainer import find_trainer_routes
from tests.attempts import make_attempt
from tests.integration.torchrun import run_ranks, start_ranks
from tests.integration.training_replay.sealed import config_of, make_run
from tests.metrics import against_the_table
from tests.patience import PATIENCE_S
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.integration
PROGRAM = "operators.training"
MEGATRON = "actor_rollout_ref.actor.megatron"
ESTIMATOR = "algorithm.adv_estimator"
HALVED = """
import dataclasses
from pipeline.rl.estimators.advantage_formulas import reinforce_plus_plus


def halved(rollouts, settings):
    estimate = reinforce_plus_plus(rollouts, settings)
    return dataclasses.replace(estimate, advantages_T=0.5 * estimate.advantages_T)
"""
"""A user's file with an estimator."""
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
WATCHED = """
from dataclasses import replace
from pipeline.rl.losses.formulas import vanilla


def watched(tokens, settings):
    loss = vanilla(tokens, settings)
    return replace(loss, reports={"rising": tokens.advantages_T > 0})
"""
"""A user's file with a loss."""
NATIVE_EVERY = "actor_rollout_ref.actor.router_replay.native_every"
UNCORRECTED = "algorithm.rollout_correction.uncorrected_staleness"
LOG_PROB_SAMPLES = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"


def train(store: Store, ranks: int, attempt: int = 0) -> str:
    """Run an attempt's training ranks to completion, and return their output.

    Args:
        store: The run's store.
        ranks: The number of ranks.
        attempt: The attempt's number.
    """
    return run_ranks(PROGRAM, ranks, "--run-uri", store.uri, "--attempt", str(attempt))


def metrics_of(store: Store, step: int) -> dict[str, Any]:
    """Return a step's metrics, and check that they have every required key."""
    metrics = read_commit(store, keys.metrics(step))["metrics"]
    assert against_the_table(metrics) == ([], [])
    return metrics


def test_r3_trains_with_one_rank(tmp_path: Path, tiny_model: Path):
    """R3 runs with several epochs, a reference and importance weights.

    The trainer's log-probs equal the engine's. Every valid row is replayed, and the other rows are
    counted as native. transformers loads the exported policy, which differs from policy 0.
    """
    config = config_of(
        router_replay={"mode": "R3", "native_every": 2},
        ppo_epochs=2,
        use_kl_loss=True,
        algorithm={"rollout_correction": {"rollout_is": "token"}},
    )
    store = make_run(tmp_path / "run", tiny_model, config, steps=2)
    make_attempt(store, 0, steps=2)
    train(store, ranks=1)

    manifest = read_manifest(store, 0)
    valid, total = (sum(manifest.rows[name].to_pylist()) for name in ("rows_valid", "rows_total"))
    first, second = metrics_of(store, 0), metrics_of(store, 1)
    assert total - valid == 2
    assert (first["replay/rows"], first["replay/rows_native"]) == (valid, 2)
    assert first["replay/coverage"] == pytest.approx(valid / total)
    assert first["replay/agreement"] >= 0.999
    assert first["replay/layers"] == 4
    assert first["mismatch/kl"] < 1e-9
    assert first["mismatch/kl_native"] < 1e-9
    assert first["mismatch/extreme_share"] == 0
    assert first["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
    assert first["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-4)
    assert first["rollout_corr/k3_kl"] == pytest.approx(first["mismatch/kl"], abs=1e-9)
    assert first["rollout_corr/ratio_token_q99"] == pytest.approx(1, abs=1e-4)
    assert first["actor/kl_loss"] > 0  # from the second epoch; the reference is policy 0
    assert first["reward/masked"] == 1
    assert second["mismatch/kl"] > first["mismatch/kl"]  # policy 1 on samples from policy 0
    assert second["mismatch/kl_native"] is None  # native_every=2: steps 0 and 2

    body = read_commit(store, keys.metrics(0))
    assert body["policy_version"] == 0
    assert body["policy_sha256"] == read_commit(store, keys.policy(1))["weights_sha256"]
    assert layers_of(body["metrics"], "replay/agreement").keys() == {0, 1, 2, 3}
    assert store.size(keys.checkpoint(2)) is not None  # the checkpoint of the last step
    assert store.size(keys.checkpoint(1)) is None
    weights = [loaded(store, version, tmp_path) for version in (0, 2)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_bypass_mode_skips_the_pass_of_old_log_probs(tmp_path: Path, tiny_model: Path):
    """With bypass_mode, later steps run only updates, which still replay and compute corrections.
    In the first step of the attempt, a replaying and a native pass check the recorded routes.
    """
    correction = {
        "preset": "bypass_pg_geo_rs_seq_tis",
        "rollout_rs_threshold": "0.9_1.1",
    }
    config = config_of(
        router_replay={"mode": "R3", "native_every": 0},
        algorithm={"rollout_correction": correction},
    )
    store = make_run(tmp_path / "run", tiny_model, config, steps=2)
    make_attempt(store, 0, steps=2)
    train(store, ranks=1)
    first, second = metrics_of(store, 0), metrics_of(store, 1)
    assert first["mismatch/kl"] < 1e-9
    assert first["mismatch/kl_native"] < 1e-9
    assert second["mismatch/kl"] is second["mismatch/kl_native"] is None
    assert second["replay/unhealthy"] is None
    for metrics in (first, second):
        assert metrics["replay/coverage"] > 0.9
        assert metrics["rollout_corr/rollout_is_mean"] > 0
        assert metrics["actor/grad_norm"] > 0
        assert metrics["actor/pg_clipfrac"] is None  # REINFORCE does not clip
    # Policy 1 trains on samples from policy 0: weights vary, and distant sequences are rejected.
    assert second["rollout_corr/rollout_is_std"] > first["rollout_corr/rollout_is_std"]
    weights = [read_commit(store, keys.policy(v))["weights_sha256"] for v in range(3)]
    assert len({*weights}) == 3


def loaded(store: Store, version: int, folder: Path) -> dict[str, torch.Tensor]:
    """Fetch a policy and load it with transformers; return its weights, keyed by name.

    Args:
        store: The run's store.
        version: The policy version.
        folder: The folder for the policy's folder.
    """
    fetch_policy(store, version, folder / str(version))
    return AutoModelForCausalLM.from_pretrained(folder / str(version)).state_dict()


def test_the_reference_never_replays(tmp_path: Path, tiny_model: Path):
    """The reference routes natively, even if the policy replays routes to different experts.

    The replayed policy then differs from the engine, while the native pass does not. The KL between
    policy and reference is far from 0, although their weights are equal. Each pass has its own
    micro-batches.
    """
    config = config_of(
        router_replay={"mode": "R3", "native_every": 1},
        use_kl_loss=True,
        optim={"lr": 1e-12},
    )
    config = with_value(config, LOG_PROB_SAMPLES, 5)
    config = with_value(config, "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", True)
    config = with_value(config, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", 50)
    store = make_run(tmp_path / "run", tiny_model, config, steps=1, other_experts=True)
    make_attempt(store, 0, steps=1, on_unhealthy="warn")
    output = train(store, ranks=1)
    metrics = metrics_of(store, 0)
    assert metrics["mismatch/kl"] > 1e-3
    assert metrics["mismatch/kl_native"] < 1e-9
    assert metrics["actor/kl_loss"] > 1e-3
    assert metrics["replay/agreement"] < 0.1
    assert metrics["replay/unhealthy"] == 4 + 12 + 1  # layers, samples and the KL
    assert "training on them anyway" in output


LAYOUTS = {
    "dp2": {},
    "cp2": {"context_parallel_size": 2},
    "pp2-vpp2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
}


def test_r2_trains_with_two_ranks(tmp_path: Path, tiny_model: Path):
    """In R2, each rank stores the routes that its part of the log-prob pass has recorded.

    The ranks differ in their pipeline stage, or in their data-parallel or context-parallel
    position. Together, their routes equal the top-k of the independent forward pass. All layouts
    have the same losses and gradient norms, up to summation order.
    """
    found = {}
    for name, megatron in LAYOUTS.items():
        config = config_of(router_replay={"mode": "R2"}, megatron=megatron)
        if name == "dp2":  # micro-batches that differ from those of the updates
            config = with_value(config, LOG_PROB_SAMPLES, 5)
        store = make_run(tmp_path / name, tiny_model, config, steps=1)
        make_attempt(store, 0, steps=1)
        train(store, ranks=2)
        metrics = found[name] = metrics_of(store, 0)
        assert metrics["replay/coverage"] == 1
        assert metrics["replay/rows_native"] == 0
        assert metrics["mismatch/kl"] == metrics["mismatch/kl_native"] < 1e-9
        second = {"dp2": "000-00001", "cp2": "000-00000-00001", "pp2-vpp2": "001-00000"}[name]
        assert trainer_files(store) == sorted(["000-00000", second])
        assert_routes_are_the_engines(store)
    for name in LAYOUTS:
        for key in ("actor/pg_loss", "actor/entropy", "actor/grad_norm"):
            assert found[name][key] == pytest.approx(found["dp2"][key], rel=1e-3)
        for key in ("actor/tokens", "replay/rows", "response/count", "response_length/clip_ratio"):
            assert found[name][key] == found["dp2"][key]


def test_a_stage_without_moe_layers_trains(tmp_path: Path):
    """A pipeline stage with only dense layers trains in R2 and R3 like any other stage.

    The first of two stages has no router, so it does not record, read or replay routes.
    """
    model = make_tiny(tmp_path / "model", "qwen3_moe", mlp_only_layers=[0, 1])
    for mode in ("R2", "R3"):
        config = config_of(
            router_replay={"mode": mode}, megatron={"pipeline_model_parallel_size": 2}
        )
        store = make_run(tmp_path / mode, model, config, steps=1)
        make_attempt(store, 0, steps=1)
        train(store, ranks=2)
        metrics = metrics_of(store, 0)
        assert metrics["replay/layers"] == 2
        assert metrics["replay/rows_native"] == {"R2": 0, "R3": 2}[mode]
        assert metrics["mismatch/kl"] < 1e-9
        if mode == "R3":
            assert metrics["replay/agreement"] >= 0.999
        else:
            assert trainer_files(store) == ["001-00000"]
            assert_routes_are_the_engines(store)


def trainer_files(store: Store) -> list[str]:
    """Return stage and ranks in the names of the files that the trainer of step 0 recorded."""
    trainer = find_trainer_routes(store, read_manifest(store, 0))
    return sorted(file.key.rpartition("/")[2].split(".")[0] for file in trainer.files)


def assert_routes_are_the_engines(store: Store) -> None:
    """Assert that the trainer recorded the engine's routes in all valid rows, except near-ties."""
    manifest = read_manifest(store, 0)
    engine = read_routes(store, manifest, manifest.ids)
    trainer = read_routes(store, used_routes(store, 0), manifest.ids)
    equal = rows = 0
    for id in manifest.ids:
        valid_T = engine[id].valid_T
        assert trainer[id].valid_T.all()
        same_TL = (engine[id].sets_TLK == trainer[id].sets_TLK).all(axis=2)
        equal, rows = equal + int(same_TL[valid_T].sum()), rows + int(same_TL[valid_T].size)
    assert rows > 500
    assert equal >= 0.999 * rows


def commits(store: Store) -> dict[str, bytes]:
    """Return every commit object of a run, keyed by the object's key."""
    return {info.key: store.read(info.key) for info in store.list("") if info.key.endswith(".json")}


def await_object(store: Store, key: str, process: Any) -> None:
    """Wait until an object exists, and fail if the ranks end earlier.

    Args:
        store: The run's store.
        key: The object's key.
        process: The torchrun process of the ranks.
    """
    deadline = time.monotonic() + PATIENCE_S
    while store.size(key) is None:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ranks_of(process: Any) -> list[psutil.Process]:
    """Return the processes of the training ranks that a torchrun process has started."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if PROGRAM in child.cmdline()]


def test_killing_a_rank_changes_nothing(tmp_path: Path, tiny_model: Path):
    """A run that is killed ends with the policies of an undisturbed run, bit by bit.

    Two ranks train four steps, with a checkpoint every other step. One rank is killed in step 3,
    right after the commit of step 2. The next attempt continues from the checkpoint of policy 2 and
    trains step 2 again without writing. No committed object changes.

    The learning rate and the coefficient of the KL penalty in the reward change in each step, and
    the second attempt continues both. It reads the coefficient from the previous step's commit. The
    estimator and the loss come from a user's files. The killed run also offloads weights, gradients
    and optimizer state between passes, and uses older weights to measure the staleness of its
    samples. Neither changes the result.
    """
    optim = {
        "lr": 1e-3,
        "lr_warmup_steps": 1,
        "lr_decay_style": "cosine",
        "lr_decay_steps": 4,
        "min_lr": 1e-4,
    }
    kl_ctrl = {"type": "adaptive", "kl_coef": 0.5, "target_kl": 1e-4, "horizon": 50}
    algorithm = {"use_kl_in_reward": True, "kl_ctrl": kl_ctrl, "adv_estimator": "mine.py:halved"}
    config = config_of(
        router_replay={"mode": "R3"},
        optim=optim,
        use_kl_loss=True,
        algorithm=algorithm,
        policy_loss={"loss_mode": "mine/losses.py:watched"},
    )
    offloaded = config
    for what in ("param", "grad", "optimizer"):
        offloaded = with_value(offloaded, f"{MEGATRON}.{what}_offload", True)
    measuring = {"trainer.max_staleness": 1, NATIVE_EVERY: 1, UNCORRECTED: True}
    for key, value in measuring.items():
        offloaded = with_value(offloaded, key, value)
    files = {ESTIMATOR: HALVED, LOSS: WATCHED}
    stores = [
        make_run(tmp_path / name, tiny_model, settings, 4, functions=files)
        for name, settings in (("calm", config), ("killed", offloaded))
    ]
    for store in stores:
        make_attempt(store, 0, steps=4, save_freq=2)
    calm, killed = stores
    train(calm, ranks=2)

    process = start_ranks(PROGRAM, 2, "--run-uri", killed.uri, "--attempt", "0")
    await_object(killed, keys.metrics(2), process)
    ranks_of(process)[1].kill()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert find_commit(killed, keys.metrics(3)) is None, output[-3000:]
    before = commits(killed)

    make_attempt(killed, 1, steps=4, save_freq=2)
    output = train(killed, ranks=2, attempt=1)
    assert "continue from the checkpoint of policy 2" in output
    after = commits(killed)
    gone = before.keys() - after.keys()
    assert all(key.startswith("policies/000001/") for key in gone)  # expired with checkpoint 4
    assert all(after[key] == before[key] for key in before.keys() - gone)
    assert metrics_of(killed, 3)["resume/policy_drift"] == 0
    for version in (3, 4):
        assert (
            read_commit(killed, keys.policy(version))["weights_sha256"]
            == read_commit(calm, keys.policy(version))["weights_sha256"]
        )
    assert metrics_of(killed, 3)["actor/grad_norm"] == metrics_of(calm, 3)["actor/grad_norm"]
    staleness = [metrics_of(killed, step)["mismatch/kl_staleness"] for step in range(4)]
    # Step 0 trains samples of its own version, with a learning rate of 0.
    assert staleness[:2] == [None, 0]
    assert all(kl > 0 for kl in staleness[2:])
    assert all(metrics_of(calm, step)["mismatch/kl_staleness"] is None for step in range(4))
    for key in ("actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"):
        values = [[metrics_of(store, step)[key] for step in range(4)] for store in stores]
        assert values[0] == values[1], "the values differ"
    assert len(set(values[0])) == 4, "the coefficient must change in each step"
    assert all(0 < metrics_of(store, 3)["policy_loss/rising"] < 1 for store in stores)
    assert all(metrics_of(store, 3)["actor/pg_clipfrac"] is None for store in stores)
    for store in stores:
        rates = [metrics_of(store, step)["actor/lr"] for step in range(4)]
        assert rates == pytest.approx([0, 1e-3, 7.75e-4, 3.25e-4])  # 1e-4 + 9e-4 * (1 + cos) / 2


def test_an_existing_policy_is_kept_without_replay(tmp_path: Path, tiny_model: Path):
    """Without replay, the replay metrics are null, and the native mismatch equals the mismatch.

    If the store already has a different policy (because kernels are not deterministic), the trainer
    keeps the stored policy, counts it and logs a warning. A stop object ends the trainer with exit
    code 0.
    """
    store = make_run(tmp_path / "run", tiny_model, config_of(), steps=1, routes=False)
    make_attempt(store, 0, steps=5)
    of_0 = read_commit(store, keys.policy(0))
    refer_policy(store, 1, files_in(of_0), of_0["weights_sha256"])
    process = start_ranks(PROGRAM, 1, "--run-uri", store.uri, "--attempt", "0")
    await_object(store, keys.metrics(0), process)
    commit(store, keys.stop(0), {"reason": "finished", "message": ""}, new_write_id())
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output[-3000:]
    metrics = metrics_of(store, 0)
    for key in ("coverage", "agreement", "rows", "rows_native"):
        assert metrics[f"replay/{key}"] is None
    assert metrics["mismatch/kl"] == metrics["mismatch/kl_native"] < 1e-9
    assert metrics["resume/policy_drift"] == 1
    body = read_commit(store, keys.metrics(0))
    assert body["policy_sha256"] == read_commit(store, keys.policy(0))["weights_sha256"]
    assert "policy 1 has digest" in output


def test_sigterm_leaves_no_scratch_files(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """An evicted pod gets SIGTERM, and downloaded weights must not stay on its node."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    store = make_run(tmp_path / "run", tiny_model, config_of(), steps=1)
    make_attempt(store, 0, steps=5)
    process = start_ranks(PROGRAM, 1, "--run-uri", store.uri, "--attempt", "0")
    await_object(store, keys.metrics(0), process)
    assert list(scratch.glob("retrace-*"))
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert not list(scratch.glob("retrace-*"))
