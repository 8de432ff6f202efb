"""The main job as a user runs it, with real vLLM, Megatron-core and Prefect, and a file store."""

import json
import shutil
from pathlib import Path

import pytest

import retrace
from pipeline.report.run_metrics import all_metrics
from pipeline.run import keys
from pipeline.run.commit import read_commit
from pipeline.store import open_store
from tests.integration.run.conftest import Query
from tests.integration.run.retrace_runs import EXAMPLE, command, run, small, workers
from tests.metrics import MEASURED, against_the_table

pytestmark = pytest.mark.integration


def test_two_workers_and_two_ranks_overlap(tmp_path: Path, on_prefect_server: Query):
    """Run R3 with 2 rollout workers, 2 data-parallel ranks and max_staleness 1.

    Each step has all metrics, and every row is replayed. The validations run, `verify` accepts the
    traces and the recorded set, and no worker remains. The Prefect server at PREFECT_API_URL
    contains the task runs and artifacts. If the same command is run again, it finds nothing to do.
    With new settings that add validations, it runs only the validations.
    """
    record = tmp_path / "set"
    settings = small(
        tmp_path,
        "wide",
        "launch.rollout_workers=2",
        "trainer.n_gpus_per_node=2",
        "trainer.max_staleness=1",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        f"actor_rollout_ref.actor.router_replay.record_file={record}",
        "data.val_files=examples/addition/val.parquet",
        "trainer.logger=[console,tensorboard,file]",
    )
    printed = run(*settings)
    uri = f"{tmp_path}/store/wide"
    store = open_store(uri)
    steps = all_metrics(store)
    assert [step.step for step in steps] == [0, 1, 2]
    for step in steps:
        assert against_the_table(step.values) == ([], [])
        assert [key for key in MEASURED if step.values[key] is None] == []
        assert step.values["replay/coverage"] == 1.0
        assert step.values["replay/rows_native"] == 0
    plans = [read_commit(store, keys.plan(n)) for n in range(3)]
    assert [plan["policy_version"] for plan in plans] == [0, 0, 1]
    assert [plan["shards"] for plan in plans] == [2, 2, 2]
    assert "validation of policy 0" in printed
    assert printed.replace("\n", "").isprintable(), "the output in a pipe has control characters"
    assert "validation of policy 3" in printed
    assert list((tmp_path / "wide/tensorboard").glob("events*"))
    lines = (tmp_path / "wide/metrics.jsonl").read_text().splitlines()
    taken = [(line["step"], line["data"]) for line in map(json.loads, lines)]
    for step in steps:
        measured = {name: value for name, value in step.values.items() if value is not None}
        assert (step.step, measured) in taken
    scores = [name for _, data in taken for name in data if name.startswith("val-core/")]
    assert len(taken) == 5
    assert len(scores) == 2, "expected one score before training and one after it"
    assert not workers(store.uri, "operators.rollout")
    assert not workers(store.uri, "operators.training")
    command("traces", "verify", uri)
    command("traces", "verify", str(record))

    ours = {"flow_runs": {"name": {"any_": ["wide"]}}}
    [flow_run] = on_prefect_server("/flow_runs/filter", ours)
    assert flow_run["state_type"] == "COMPLETED"
    found = on_prefect_server("/task_runs/filter", ours)
    tasks = {task["name"]: task["state_type"] for task in found}
    for name in ("rollout-0", "train-0", "rollout-1", "train-1", "validate-0", "validate-3"):
        assert tasks[name] == "COMPLETED"
    artifacts = {a["key"]: a for a in on_prefect_server("/artifacts/latest/filter", {})}
    assert artifacts["wide-progress"]["data"] == 100.0
    rows = json.loads(artifacts["wide-metrics"]["data"])
    assert [row["critic/rewards/mean"] for row in rows] == [
        s.values["critic/rewards/mean"] for s in steps
    ]

    writes = retrace.check(EXAMPLE, settings).writes  # the estimate made before a run
    for estimated, prefixes, least, most in (
        (writes.policy, ["policies/000003/"], 0.9, 1.1),
        (writes.checkpoint, ["checkpoints/000003/"], 0.7, 1.1),
        (writes.step - writes.policy, [f"steps/00000{n}/" for n in range(3)], 1.0, 8.0),
    ):
        written = [info.size for prefix in prefixes for info in store.list(prefix)]
        assert least < estimated * len(prefixes) / sum(written) < most, prefixes

    # The same command reports that nothing is left to do, and starts no attempt.
    again = run(*settings)
    assert "all 3 steps are already finished" in again
    assert "finished, nothing is left to do" in again
    assert store.size(keys.attempt(1)) is None
    again = run(*settings, "trainer.test_freq=1")
    assert "validation of policy 1" in again
    assert "validation of policy 2" in again
    assert "validation of policy 3" not in again

    # A changed learning rate is refused, and the message names the key.
    refused = run(*settings, "actor_rollout_ref.actor.optim.lr=0.5", expect=2)
    assert "actor_rollout_ref.actor.optim.lr" in refused


def test_r3_lowers_the_mismatch(tmp_path: Path):
    """Replaying the engine's routes lowers the k3 estimate of KL(engine, trainer).

    The example model runs in bf16 with a fixed seed, over at least 20,000 response tokens.
    """
    run(
        *small(
            tmp_path,
            "mismatch",
            "trainer.total_training_steps=1",
            "data.train_batch_size=150",
            "actor_rollout_ref.actor.ppo_mini_batch_size=150",
            "actor_rollout_ref.rollout.n=8",
        )
    )
    [step] = all_metrics(open_store(f"{tmp_path}/store/mismatch"))
    assert step.values["actor/tokens"] >= 20_000
    assert step.values["mismatch/kl"] < step.values["mismatch/kl_native"]
    assert step.values["replay/agreement"] < 1.0  # otherwise replay would change nothing


@pytest.mark.parametrize("mode", ["disabled", "R2"])
@pytest.mark.usefixtures("on_prefect_server")
def test_a_run_completes_in_the_other_modes(tmp_path: Path, mode: str):
    """The run completes in each mode. As in verl's scripts, the setting's value is quoted.

    R2 stores its routes. A run that replays the set recorded from these routes has no rollout
    worker, and its policy is bit-identical.
    """
    record = tmp_path / "set"
    settings = small(
        tmp_path,
        mode.lower(),
        f'actor_rollout_ref.actor.router_replay.mode="{mode}"',
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=False",
    )
    if mode == "R2":
        settings.append(f"actor_rollout_ref.actor.router_replay.record_file={record}")
    run(*settings)
    store = open_store(f"{tmp_path}/store/{mode.lower()}")
    for step in all_metrics(store):
        assert step.values["mismatch/kl"] == step.values["mismatch/kl_native"]
        if mode == "R2":
            assert step.values["replay/coverage"] == 1.0
        else:
            assert step.values["replay/coverage"] is None
    if mode == "disabled":
        return
    assert store.size(keys.trainer_routes(0)) is not None
    command("traces", "verify", str(record))
    shutil.rmtree(record / "steps/000001")  # as if the flow had ended just before writing it
    run(*settings)
    command("traces", "verify", str(record), "--step", "1")
    run(
        *small(
            tmp_path,
            "again",
            'actor_rollout_ref.actor.router_replay.mode="R2"',
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=False",
            f"actor_rollout_ref.actor.router_replay.replay_file={record}",
        )
    )
    again = open_store(f"{tmp_path}/store/again")
    ours, theirs = (read_commit(s, keys.policy(2))["weights_sha256"] for s in (store, again))
    assert ours == theirs
    assert json.dumps(all_metrics(again)[1].values["actor/grad_norm"]) == json.dumps(
        all_metrics(store)[1].values["actor/grad_norm"]
    )
