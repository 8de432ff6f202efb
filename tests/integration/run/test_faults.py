"""If a part of a run is killed with kill -9, the run completes and no committed object changes."""

import subprocess
import time
from pathlib import Path

import psutil
import pytest

import retrace
from pipeline.report.run_metrics import all_metrics
from pipeline.run import keys
from pipeline.run.attempts import read_attempt
from pipeline.run.commit import read_commit, sha256
from pipeline.run.restarts import attempt_count
from pipeline.store import Store, open_store
from pipeline.traces import read_manifest
from tests.integration.run.retrace_runs import EXAMPLE, command, run, small, start, workers
from tests.patience import PATIENCE_S, eventually

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("on_prefect_server")]


def wait_for(store: Store, key: str, flow: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until an object exists, and fail if the flow ends earlier.

    Args:
        store: The run's store.
        key: The object's key.
        flow: The flow's process.
        log: The file with the flow's output.
    """
    deadline = time.monotonic() + 400
    while store.size(key) is None:
        assert flow.poll() is None, f"the flow ended before {key}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"{key} did not appear:\n{log.read_text()}"
        time.sleep(0.02)


def the_only(store: Store, module: str) -> psutil.Process:
    """Wait until a run's only worker of a kind has started, and return its process."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := workers(store.uri, module)):
        assert time.monotonic() < deadline, f"no {module} was started"
        time.sleep(0.02)
    [process] = found
    return process


def contents(store: Store) -> dict[str, str]:
    """Return the digest of each object in the store, keyed by the object's key."""
    return {info.key: sha256(store.read(info.key)) for info in store.list("")}


def test_a_run_survives_kill_9_of_worker_rank_and_flow(tmp_path: Path):
    """Kill a rollout worker in step 0, the training rank in step 1, and the flow in step 2.

    The rank and the flow are killed once their step is sealed. The flow restarts the worker and the
    rank; the flow itself is replaced by running the same command again. No sample id occurs twice,
    and no stored object changes. Each policy is bit-identical to the one that an undisturbed
    trainer computes from the same sealed steps.
    """
    settings = small(tmp_path, "faults", "trainer.total_training_steps=3", "trainer.save_freq=2")
    uri = tmp_path / "store/faults"
    store = open_store(str(uri))
    log = tmp_path / "flow.log"
    flow = start(log, *settings)

    wait_for(store, keys.plan(0), flow, log)
    the_only(store, "operators.rollout").kill()

    wait_for(store, keys.manifest(1), flow, log)
    the_only(store, "operators.training").kill()
    assert store.size(keys.metrics(1)) is None, "the rank was killed too late for this test"
    again = "no checkpoint yet: training step 0 again before step 1"
    eventually(lambda: again in log.read_text(), lambda: f"expected: {again}\n{log.read_text()}")

    wait_for(store, keys.manifest(2), flow, log)
    flow.kill()
    flow.wait()
    assert store.size(keys.metrics(2)) is None, "the flow was killed too late for this test"
    both = ("operators.rollout", "operators.training")
    eventually(
        lambda: not any(workers(store.uri, module) for module in both),
        lambda: "a worker outlived the flow",
    )
    before = contents(store)

    run(*settings)
    after = contents(store)
    changed = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    removed = {key.partition("/")[0] for key in before.keys() - after.keys()}
    assert not changed
    assert removed <= {"policies", "signs"}  # expired policies, and the killed flow's sign of life
    assert len(all_metrics(store)) == 3
    ids = [sample for step in range(3) for sample in read_manifest(store, step).ids]
    assert len(ids) == len(set(ids)) == 3 * 8 * 4
    command("traces", "verify", str(uri))

    undisturbed = small(
        tmp_path,
        "undisturbed",
        "trainer.total_training_steps=3",
        f"actor_rollout_ref.actor.router_replay.replay_file={uri}",
    )
    run(*undisturbed)
    other = open_store(str(tmp_path / "store/undisturbed"))
    for step in range(3):
        ours, theirs = (read_commit(s, keys.metrics(step))["policy_sha256"] for s in (store, other))
        assert ours == theirs, f"step {step}"


def test_a_reward_function_that_raises_can_be_fixed(tmp_path: Path):
    """A reward function that fails on all inputs is refused, before anything is staged or started.

    If it fails on samples, the run ends with exit code 1, without restarts. The output gives the
    sample's id and the function's own error. After the file is fixed, the same command continues
    the run. Once the function has scored a sample, a changed file is refused;
    the message lists the settings for a new run that accepts the file.
    """
    reward = tmp_path / "reward.py"
    signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    fails = "raise KeyError('no such rubric')\n"
    reward.write_text(f"{signature}    {fails}")
    settings = small(
        tmp_path,
        "raises",
        f"custom_reward_function.path={reward}",
        "trainer.total_training_steps=1",
    )
    printed = run(*settings, expect=2)
    assert "failed on 8 of 8 trial inputs" in printed
    assert "KeyError: 'no such rubric' (reward.py, line 2)" in printed
    assert not (tmp_path / "store/raises/run.json").exists()

    reward.write_text(
        f"{signature}    if solution_str not in ('', ground_truth): {fails}    return 1"
    )
    printed = run(*settings, expect=1)
    assert ": restart " not in printed
    assert "no such rubric" in printed
    assert "000000/" in printed

    mended = signature + "    return len(solution_str) % 2\n"
    reward.write_text(mended)
    printed = run(*settings)
    assert "the run is changed: the reward function (custom_reward_function.path: " in printed
    uri = f"{tmp_path}/store/raises"
    opened = retrace.open_run(uri)
    attempt = read_attempt(opened.store, attempt_count(opened.store) - 1)
    assert "inputs.reward" in attempt.changes
    assert {sample.reward for sample in opened.step(0).samples()} <= {0.0, 1.0}
    maker = read_commit(opened.store, keys.rollout(0, 0))["maker"]
    assert maker["attempt_number"] == attempt.number
    command("traces", "verify", uri)

    reward.write_text(mended + "# another\n")
    printed = run(*settings, expect=2)
    words = printed.rpartition(": add ")[2].split()[:2]
    assert words[0] == "trainer.experiment_name=raises-2"
    command("check", str(EXAMPLE), *settings, *words)


def test_a_prefect_server_that_does_not_answer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    printed = run(*small(tmp_path, "unreachable"), expect=2)
    assert "PREFECT_API_URL: found http://127.0.0.1:9/api, which cannot be reached" in printed
    assert not (tmp_path / "store/unreachable").exists()
