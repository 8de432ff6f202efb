"""The rollout worker's program with a file store and a real engine, without other processes."""

import shutil
import signal
import time
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow.compute as pc
import pytest
from safetensors.numpy import load_file

from operators.rollout.handover import Handover
from operators.rollout.scoring import Scorer
from operators.rollout.shard import ShardMaker, Task
from operators.rollout.types import Request
from operators.rollout.worker import Worker, read_inputs, start_engine, start_scorer
from pipeline.config.tree import RunConfig
from pipeline.flows.sub_plans import make_groups
from pipeline.inputs.stage import StagedRun
from pipeline.policies.cache import PolicyCache, PolicyTimes
from pipeline.rl.rewards import RewardError
from pipeline.run import keys
from pipeline.run.attempts import read_attempt
from pipeline.run.commit import find_commit, read_commit
from pipeline.run.plan import publish_plan, read_plan
from pipeline.run.uses import SupersededError
from pipeline.store import open_store
from pipeline.traces import (
    baseline_ids,
    expected_ids,
    read_manifest,
    read_routes,
    read_samples,
    seal,
    shard_ids,
)
from pipeline.traces.format.manifest import BASELINE
from pipeline.upkeep.verify import verify
from tests.attempts import make_attempt
from tests.integration.rollout import runs
from tests.integration.rollout.reference import ReferenceModel
from tests.patience import PATIENCE_S
from tests.policies import write_policy

pytestmark = pytest.mark.integration
CHANGED = "model.layers.2.self_attn.q_proj.weight"
WEIGHTS = "5" * 64
"""A weights digest for shards that are generated without the worker's program."""


def wait_for(store, worker, *wanted):
    deadline = time.monotonic() + PATIENCE_S
    while any(store.size(key) is None for key in wanted):
        assert worker.poll() is None, worker.stderr.read()[-4000:]
        assert time.monotonic() < deadline, f"{wanted} did not appear"
        time.sleep(0.05)


def contents(store):
    return {info.key: store.read(info.key) for info in store.list("")}


def sealed(store, step):
    """Seal a step; return its samples in order, and its routes keyed by sample id."""
    plan = read_plan(store, keys.plan(step))
    ids, greedy = partial(shard_ids, plan), baseline_ids(plan)
    seal(store, step, plan.shards, ids, plan.policy_version, baselines=greedy)
    manifest = read_manifest(store, step)
    assert sorted(manifest.ids) == sorted(expected_ids(plan))
    samples = read_samples(store, manifest, manifest.ids)
    return samples, read_routes(store, manifest, manifest.ids)


def assert_made_by(reference, version, samples, routes):
    """Assert that a policy made the log-probs and routes, and check the samples' other fields.

    Args:
        reference: The ReferenceModel of the policy.
        version: The policy version.
        samples: The samples.
        routes: Their routes, keyed by sample id.
    """
    for sample in samples:
        expected = reference(sample.tokens_S)
        wrong_TL = (routes[sample.id].sets_TLK != expected.sets_TLK).any(-1)
        assert routes[sample.id].valid_T.all()
        assert not (wrong_TL & ~expected.near_tie_TL).any()
        np.testing.assert_allclose(
            sample.logprobs_G,
            expected.logprobs_of(sample.response_tokens_G, runs.TEMPERATURE),
            atol=2e-4,
        )
        assert {span.version for span in sample.version_spans} == {version}
        assert sample.loss_mask_G.all()
        assert sample.extras == {"truth": sample.prompt_id[0], "source": "by-hand"}
        assert sample.reward in (0.0, 1.0, 2.0)


def test_a_worker_generates_steps_and_a_validation_until_the_stop(tmp_path):
    """A worker generates two steps of two shards and a validation, and ends at the stop object.

    Each step has its own policy. Ids, tokens, routes, log-probs and rewards in the store are those
    of the step's policy. Policy 2 is stored as a difference from policy 1, which no step uses.

    A second worker runs on a copy of the run from which the commit of one shard has been removed.
    It generates only that shard, with the same samples, and changes nothing else. It starts with
    policy 1 and loads only the tensor in which policy 2 differs, whereas the first worker loaded
    all tensors. SIGTERM ends the second worker with exit code 143.
    """
    store = open_store(str(tmp_path / "run"))
    policies = runs.make_run(store, tmp_path, validations=(0,))
    worker = runs.start_worker(store, 0)
    runs.plan(store, 0, 0)
    runs.plan(store, 0, 0, validation=True)
    wait_for(store, worker, keys.rollout(0, 0), keys.rollout(0, 1))
    wait_for(store, worker, keys.validation(0, 0), keys.validation(0, 1))
    runs.plan(store, 1, 2)
    time.sleep(0.5)
    assert find_commit(store, keys.rollout(1, 0)) is None, "generated before its policy exists"
    weights = load_file(policies[1] / "model.safetensors")
    former = weights | {CHANGED: np.zeros_like(weights[CHANGED])}
    others = {p.name: p.read_bytes() for p in policies[1].iterdir() if p.suffix != ".safetensors"}
    write_policy(store, 1, former, others=others)
    write_policy(store, 2, weights, former)
    wait_for(store, worker, keys.rollout(1, 0), keys.rollout(1, 1))
    runs.stop(store, 0)
    assert worker.wait(PATIENCE_S) == 0, worker.stderr.read()[-4000:]
    printed = worker.stderr.read()
    assert "step 0 shard 0: 9 samples" in printed
    assert "step 1 shard 1: 6 samples" in printed
    assert "tokens/s" in printed
    assert "policy 2 loaded (changed tensors: any of" in printed

    validations = [read_commit(store, keys.validation(0, shard)) for shard in range(2)]
    assert [body["count"] for body in validations] == [3, 2]
    assert all(body["reward_mean"] == body["reward_sum"] / body["count"] for body in validations)

    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for step in range(2):
        samples, routes = sealed(store, step)
        assert len(samples) == 15
        assert {sample.prompt_id for sample in samples} == {"0", "1", "2", "3.1", "4"}
        assert_made_by(ReferenceModel(policies[step]), (0, 2)[step], samples, routes)

    copy = open_store(str(tmp_path / "copy"))
    (tmp_path / "copy" / keys.rollout(1, 1)).unlink()
    sealed(copy, 0)  # the worker then begins at step 1
    before = contents(copy)
    runs.begin(copy, 1, validations=(0,))
    again = runs.start_worker(copy, 1)
    wait_for(copy, again, keys.rollout(1, 1))
    again.send_signal(signal.SIGTERM)
    assert again.wait(PATIENCE_S) == 143
    assert "policy 2 loaded (changed tensors: 1 of" in again.stderr.read()
    after = contents(copy)
    assert {key: after[key] for key in before} == before
    added = after.keys() - before.keys()
    assert len([key for key in added if key.endswith(".parquet")]) == 2
    assert added - {keys.rollout(1, 1), keys.attempt(1)} == {
        key for key in added if key.startswith("steps/000001/rollout/00001.")
    } - {keys.rollout(1, 1)}
    samples_again, _ = sealed(copy, 1)
    for one, other in zip(samples, samples_again, strict=True):
        assert one.id == other.id
        assert one.seed == other.seed
        np.testing.assert_array_equal(one.tokens_S, other.tokens_S)


def test_a_worker_that_cannot_start_names_the_cause(tmp_path):
    """The worker ends with exit code 1, and its output contains no traceback."""
    store = open_store(str(tmp_path / "run"))
    worker = runs.start_worker(store, 0)
    assert worker.wait(PATIENCE_S) == 1
    printed = worker.stderr.read()
    assert "attempts/000.json" in printed
    assert "Traceback" not in printed


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Yield the folder and inputs of a run with a plan for step 0, and an engine with policy 0."""
    folder = tmp_path_factory.mktemp("begun")
    store = open_store(str(folder / "run"))
    runs.make_run(store, folder, raises=(2,))
    inputs = read_inputs(store, read_attempt(store, 0))
    runs.plan(store, 0, 0)
    with closing(PolicyCache(store, folder)) as policies:
        engine, _ = start_engine(policies, inputs, 0)
        yield folder / "run", inputs, engine
        engine.close()


def copy_of(folder, to):
    """Copy the planned run for one test, and open the copy's store."""
    shutil.copytree(folder, to)
    return open_store(str(to))


def make(store, inputs, engine, buffer_bytes):
    """Generate and seal step 0; samples whose reward function fails are masked.

    Args:
        store: The run's store.
        inputs: The run's inputs.
        engine: The engine with policy 0.
        buffer_bytes: The size of the worker's buffer.

    Returns:
        The samples in order, and the routes, keyed by sample id.
    """
    task = Task(read_plan(store, keys.plan(0)), inputs.prompts)
    settings = inputs.config.reward.model_copy(update={"on_error": "mask"})
    with Scorer(inputs.code, settings, PATIENCE_S, 24) as scorer:
        maker = ShardMaker(store, engine, scorer, inputs.geometry, 0, buffer_bytes, 0)
        for shard in range(2):
            maker.make(task, shard, WEIGHTS, PolicyTimes(fetch=3.0, stall=2.0))
    return sealed(store, 0)


def test_a_reward_function_that_raises_ends_the_worker_or_masks_the_sample(begun, tmp_path):
    """If a reward function raises an exception, reward.on_error decides whether the worker ends.

    With `fail`, the error names the sample, the other requests are aborted, and the store contains
    no commit, no data file and no unfinished upload. With `mask`, the sample is stored with the
    error instead of a reward, and the other samples have rewards. The same engine serves both
    cases.
    """
    folder, inputs, engine = begun
    store = copy_of(folder, tmp_path / "run")
    attempt = read_attempt(store, 0)
    with start_scorer(inputs) as scorer, closing(PolicyCache(store, tmp_path)) as policies:
        worker = Worker(
            store=store,
            index=0,
            attempt=attempt,
            inputs=inputs,
            engine=engine,
            weights=WEIGHTS,
            policies=policies,
            ahead=None,
            scorer=scorer,
            step=0,
            validations=[],
        )
        with pytest.raises(RewardError, match=r"sample 000000/2/\d .*KeyError: 'no such rubric'"):
            worker.run()
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert not list(store.list("steps/000000/rollout/"))
    assert not list(store.debris("steps/"))

    samples, _ = make(store, inputs, engine, 1 << 20)
    for sample in samples:
        if sample.prompt_id == "2":
            assert sample.reward is None
            assert "no such rubric" in sample.reward_error
        else:
            assert sample.reward is not None
            assert sample.reward_error is None


def test_a_later_attempt_begins_while_a_shard_is_generated(begun, tmp_path):
    """The shard is not committed, because the later attempt may use other inputs."""
    folder, inputs, engine = begun
    store = copy_of(folder, tmp_path / "run")
    make_attempt(store, inputs.attempt + 1, steps=1)
    with pytest.raises(SupersededError, match=keys.attempt(inputs.attempt + 1)):
        make(store, inputs, engine, 1 << 20)
    assert store.size(keys.rollout(0, 0)) is None


def test_a_small_buffer_gives_the_same_samples(begun, tmp_path, monkeypatch):
    """Ids, tokens, log-probs, rewards and routes do not depend on the size of the buffer.

    The samples that wait for the writer's thread take at most half of the buffer, unless a single
    sample is larger. The commit lists how many seconds the writer's thread spends on each part of
    its work.
    """
    folder, inputs, engine = begun
    large = make(copy_of(folder, tmp_path / "large"), inputs, engine, 1 << 30)

    held, sizes = [], []

    class Counted(Handover):
        def put(self, item, size):
            super().put(item, size)
            held.append(self.held_bytes)
            sizes.append(size)

    monkeypatch.setattr("operators.rollout.shard.Handover", Counted)
    limit = 2 << 10
    store = copy_of(folder, tmp_path / "small")
    small = make(store, inputs, engine, 2 * limit)
    assert sum(sizes) > 8 * limit
    assert max(held) <= max(limit, *sizes)
    for one, other in zip(large[0], small[0], strict=True):
        assert (one.id, one.seed, one.reward) == (other.id, other.seed, other.reward)
        np.testing.assert_array_equal(one.tokens_S, other.tokens_S)
        np.testing.assert_array_equal(one.logprobs_G, other.logprobs_G)
        np.testing.assert_array_equal(large[1][one.id].sets_TLK, small[1][one.id].sets_TLK)
    for shard in range(2):
        maker = read_commit(store, keys.rollout(0, shard))["maker"]
        assert (maker.pop("worker"), maker.pop("attempt_number")) == (0, 0)
        assert set(maker) == {
            "generation_s",
            "score_s",
            "capture_s",
            "encode_s",
            "upload_s",
            "blocked_s",
            "policy_fetch_s",
            "policy_stall_s",
            "after_generation_s",
            "left_out",
            "tokens",
            "extras",
            "sources",
        }
        assert (maker["policy_fetch_s"], maker["policy_stall_s"]) == (3.0, 2.0)
        rewards = ("extras", "sources")
        assert all(number >= 0 for name, number in maker.items() if name not in rewards)


def test_groups_without_variance_are_replaced(begun, tmp_path):
    """Dynamic sampling with a real engine seals the first two groups with variance.

    The flow plans the window's prompts batch by batch. The store contains the rejected groups, each
    with its reason; in one group, the reward function failed. Repeating the step leads to the same
    result.
    """
    folder, inputs, engine = begun
    filters = {"enable": True, "metric": "seq_reward", "max_num_gen_batches": 5}
    body = inputs.config.model_dump(mode="json")
    body["data"]["train_batch_size"] = 2
    body["actor_rollout_ref"]["rollout"]["n"] = 3
    config = RunConfig.model_validate(body | {"algorithm": {"filter_groups": filters}})
    settings = config.reward.model_copy(update={"on_error": "mask"})
    sealed_steps = []
    for name in ("one", "other"):
        store = copy_of(folder, tmp_path / name)
        store.delete(keys.plan(0))
        run = StagedRun("t", store.uri, store, config, {}, inputs.geometry, 5, 0, ())
        with Scorer(inputs.code, settings, PATIENCE_S, 24) as scorer:
            maker = ShardMaker(store, engine, scorer, inputs.geometry, 0, 1 << 20, 0)

            def await_shards(what, plan, maker=maker):
                for shard in range(plan.shards):
                    maker.make(Task(plan, inputs.prompts), shard, WEIGHTS)

            made = make_groups(config, run, 0, 2, await_shards)
        seal(store, 0, made.shards, made.ids_of_shard, 0, rejected=made.rejected)
        sealed_steps.append((made, read_manifest(store, 0)))
    (made, one), (again, other) = sealed_steps
    assert len(made.plans) > 1
    assert made == again
    assert one.rows["token_digest"].equals(other.rows["token_digest"])
    rewards = {}
    for row in one.rows.select(["group", "reward"]).to_pylist():
        rewards.setdefault(row["group"], []).append(row["reward"])
    assert [len(values) for values in rewards.values()] == [3, 3]
    assert all(len(set(values) - {None}) > 1 for values in rewards.values())
    reasons = {group.group: group.reason for group in one.rejected}
    assert len(reasons) == 2 * len(made.plans) - 2
    failed = [g for g in {**rewards, **reasons} if g.split("/")[1].split(".")[0] == "2"]
    assert all(reasons[group] == "fewer than two samples have seq_reward" for group in failed)


def test_the_baseline_of_a_group_is_greedy(begun, tmp_path):
    """The last sample of each group is the greedy response, which is not trained on.

    The other samples are the same as without baselines.
    """
    folder, inputs, engine = begun
    store = copy_of(folder, tmp_path / "without")
    without = {sample.id: sample for sample in make(store, inputs, engine, 1 << 20)[0]}
    store = copy_of(folder, tmp_path / "with")
    plan = replace(read_plan(store, keys.plan(0)), baseline=True)
    store.delete(keys.plan(0))
    publish_plan(store, plan)
    samples, routes = make(store, inputs, engine, 1 << 20)
    manifest = read_manifest(store, 0)
    marked = manifest.rows.filter(pc.equal(manifest.rows["not_trained"], BASELINE))
    assert sorted(marked["id"].to_pylist()) == sorted(baseline_ids(plan))
    assert len(marked) == 5
    greedy = replace(plan.sampling, temperature=0.0)
    for sample in samples:
        if sample.id in without:
            np.testing.assert_array_equal(sample.tokens_S, without[sample.id].tokens_S)
            continue
        assert not sample.loss_mask_G.any()
        request = Request("alone", tuple(sample.prompt_tokens_P.tolist()), 1)
        [alone] = engine.generate([request], greedy)
        np.testing.assert_array_equal(sample.response_tokens_G, alone.tokens_G)
        assert len(routes[sample.id].valid_T) == len(sample.tokens_S) - 1
    problems = [problem.text for problem in verify(store, 0).problems]
    assert [text for text in problems if WEIGHTS not in text] == []


KILLS_ONCE = """
import os, pathlib, signal

def compute_score(data_source, solution_str, ground_truth, extra_info):
    flag = pathlib.Path({flag!r})
    tried = solution_str in ("", ground_truth)  # in the trial before the engine starts
    if not tried and not flag.exists():
        flag.touch()
        os.kill(os.getppid(), signal.SIGKILL)  # the worker
    return 1.0
"""


def test_a_worker_killed_during_generation_leaves_only_debris(tmp_path):
    """A worker is killed with kill -9 when the first response of a shard has finished.

    The killed worker leaves only debris, and the next worker generates the whole step.
    """
    store = open_store(str(tmp_path / "run"))
    reward = KILLS_ONCE.format(flag=str(tmp_path / "killed"))
    runs.make_run(store, tmp_path, reward=reward)
    runs.plan(store, 0, 0)
    runs.begin(store, 0)
    killed = runs.start_worker(store, 0)
    assert killed.wait(PATIENCE_S) == -signal.SIGKILL
    assert not list(store.list("steps/000000/rollout/"))
    assert list(store.debris("steps/000000/rollout/"))
    runs.begin(store, 1)
    runs.stop(store, 0)
    again = runs.start_worker(store, 1)
    wait_for(store, again, keys.rollout(0, 0), keys.rollout(0, 1))
    runs.stop(store, 1)
    assert again.wait(PATIENCE_S) == 0
    samples, _ = sealed(store, 0)
    assert len(samples) == 15
    assert {sample.reward for sample in samples} == {1.0}
