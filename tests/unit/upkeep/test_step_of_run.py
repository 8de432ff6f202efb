"""`verify` compares a step with the replay mode in the run's settings and the run's policies."""

import json
import re
from dataclasses import replace

import pytest

from pipeline.policies.versions import publish_policy, weights_of
from pipeline.run import keys
from pipeline.run.amendments import Amendment, write_amendment
from pipeline.run.commit import commit
from pipeline.run.description import create_description, read_created, with_settings
from pipeline.run.plan import publish_plan
from pipeline.store import open_store
from pipeline.traces import NewTrainingSet, read_manifest, seal, seal_training_set, write_shard
from pipeline.traces.recorded_sets import write_recorded_set
from pipeline.upkeep.verify import verify
from tests.data_files import put_data
from tests.forged_sets import put_signed, resign, training_commits
from tests.memory_store import MemoryStore
from tests.samples import (
    GEOMETRY,
    R2,
    R3,
    STAGES,
    make_plan,
    make_samples,
    sealed_r2,
    sealed_r3,
    without_routes,
    write_run,
    write_stage,
)
from tests.stored_runs import rewrite
from tests.weights import some_weights

SAMPLES = make_samples()
REPLAY = "actor_rollout_ref.actor.router_replay"


@pytest.fixture
def store():
    return MemoryStore()


def described(store, **replay):
    """Write run.json and the plan of a step, with these replay settings."""
    write_run(other := MemoryStore(), SAMPLES, replay.get("mode", "R3"))
    run = read_created(other)
    changes = {f"{REPLAY}.{name}": value for name, value in replay.items()}
    create_description(store, replace(run, settings=with_settings(run.settings, changes)))
    for info in other.list("inputs/"):
        store.create(info.key, other.read(info.key))
    publish_plan(store, make_plan())


def texts(store) -> list[str]:
    return [str(problem) for problem in verify(store).problems]


class TestTraining:
    @pytest.mark.parametrize("mode", ["R3", "disabled"])
    def test_only_a_run_with_r2_may_have_training_sets(self, store, mode):
        described(store, mode=mode)
        sealed_r3(store, SAMPLES, training=True)
        (problem,) = texts(store)
        assert problem.startswith(f"{keys.manifest(0)}: training is True, but run.json has")
        assert repr(mode) in problem

    def test_the_manifest_of_an_r2_step_must_expect_a_training_set(self, store):
        described(store, mode="R2")
        sealed_r3(store, SAMPLES)
        (problem,) = texts(store)
        assert problem.startswith(f"{keys.manifest(0)}: training is False, but run.json has")

    def test_a_single_step_is_also_compared(self, store):
        described(store, mode="R2")
        sealed_r3(store, SAMPLES)
        assert [problem.key for problem in verify(store, 0).problems] == [keys.manifest(0)]

    def test_a_step_that_replays_a_set_records_nothing(self, store):
        described(store, mode="R2", replay_file="sets/one")
        sealed_r3(store, SAMPLES)
        assert texts(store) == []

    def test_correct_steps_have_no_problems(self, store):
        described(store, mode="R2")
        sealed_r2(store, SAMPLES)
        assert texts(store) == []
        other = MemoryStore()
        write_recorded_set(store, other, 0)  # from an R2 step; the set has no run.json
        assert texts(other) == []


@pytest.fixture
def policy(tmp_path):
    """Return a function that writes a folder of weights generated from a seed."""

    def made(seed: int):
        folder = tmp_path / f"policy-{seed}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(some_weights(seed))
        return folder

    return made


def sealed_with(store, weights: str) -> None:
    """Write an R3 step whose tokens were generated with the weights that have this digest."""
    write_shard(store, 0, 0, "0" * 8, SAMPLES, GEOMETRY, R3, policies={0: weights})
    seal(store, 0, 1, lambda _: [sample.id for sample in SAMPLES], 0)


class TestWeights:
    def test_weights_of_a_different_policy_are_named(self, store, policy):
        described(store)
        publish_policy(store, 0, policy(0))
        sealed_with(store, "a" * 64)
        (problem,) = texts(store)
        assert problem.startswith(f"{keys.manifest(0)}: policy 0 has weights {'a' * 64}, ")
        assert keys.policy(0) in problem

    def test_weights_of_the_runs_own_policy_are_accepted(self, store, policy):
        described(store)
        publish_policy(store, 0, policy(0))
        sealed_with(store, weights_of(store, 0))
        assert texts(store) == []

    def test_weights_of_a_policy_that_expired_are_not_compared(self, store):
        described(store)
        sealed_with(store, "a" * 64)
        assert texts(store) == []

    def test_weights_of_an_amended_model_are_not_compared_with_the_first_commit(
        self, store, policy
    ):
        described(store)
        publish_policy(store, 0, policy(0))
        model = put_data(store, keys.input_file("2" * 64, "model.safetensors"), some_weights(1))
        changes = {"inputs.model": {"model.safetensors": model}}
        write_amendment(store, Amendment(0, "why", 0, changes))
        sealed_with(store, weights_of(store, 0))
        assert not [text for text in texts(store) if "weights" in text]

    @pytest.mark.parametrize("others", [False, True])
    def test_weights_of_a_replayed_set_may_differ_if_a_setting_allows_it(
        self, store, policy, others
    ):
        described(store, replay_file="sets/one", replay_other_weights=others)
        publish_policy(store, 0, policy(0))
        sealed_with(store, "a" * 64)
        assert len(texts(store)) == (0 if others else 1)

    def test_weights_of_a_training_set_are_compared(self, store, policy):
        described(store, mode="R2")
        publish_policy(store, 0, policy(0))
        write_shard(store, 0, 0, "0" * 8, without_routes(SAMPLES), None, None)
        seal(store, 0, 1, lambda _: [sample.id for sample in SAMPLES], 0, training=True)
        new = NewTrainingSet(read_manifest(store, 0), R2, policies={0: "b" * 64})
        for stage, layers in STAGES:
            write_stage(store, new, stage, 0, layers, SAMPLES)
        seal_training_set(store, new, GEOMETRY)
        (problem,) = texts(store)
        assert problem.startswith(f"{keys.training_set(0)}: policy 0 has weights {'b' * 64}, ")

    @pytest.mark.parametrize("right", [False, True])
    def test_weights_in_metrics_are_those_of_the_next_policy(self, store, policy, right):
        described(store)
        publish_policy(store, 1, policy(0))
        sealed_r3(store, SAMPLES)
        digest = weights_of(store, 1) if right else "c" * 64
        commit(store, keys.metrics(0), {"step": 0, "metrics": {}, "policy_sha256": digest}, "a")
        assert [text.split(":")[0] for text in texts(store)] == ([] if right else [keys.metrics(0)])

    def test_weights_of_an_older_run_have_a_different_digest(self, tmp_path, policy):
        """The commit of an older run's policy contains a digest of files.

        The metrics, which a newer trainer wrote, contain the digest of the policy's weights.
        """
        store = open_store(str(tmp_path / "run"))
        described(store)
        publish_policy(store, 1, policy(0))
        weights = weights_of(store, 1)
        sealed_r3(store, SAMPLES)
        commit(store, keys.metrics(0), {"step": 0, "metrics": {}, "policy_sha256": weights}, "a")
        path = tmp_path / "run" / keys.policy(1)
        rewrite(path, {"sha256": "d" * 64})
        body = path.read_text()
        path.write_text(body.replace('"weights_sha256"', '"weights_of_old"'))
        rewrite(path, {})
        assert not [text for text in texts(store) if text.startswith(keys.metrics(0))]


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ((), True, "digests: True is not a list"),
        ((0, 0), "000000/9/0", "sample 000000/9/0 is not in the step's manifest|has digests None"),
        ((0, 1), "0" * 64, "has digests"),
        ((0, 2), "0" * 64, "has digests"),
    ],
)
def test_samples_in_a_recorded_sets_training_commits_are_compared(store, place, value, says):
    """The samples are compared with the set's manifest, because a forger can recompute the digests
    of the commits."""
    sealed_r2(store, SAMPLES)
    record = MemoryStore()
    write_recorded_set(store, record, 0)
    assert not texts(record)
    (key, *_) = training_commits(record)
    digests = json.loads(record.read(key))["digests"]
    if place:
        row, column = place
        digests[row][column] = value
    body = resign(record, key, digests=digests if place else value)
    manifest = json.loads(record.read(keys.manifest(0)))
    for ref in manifest["data"]:
        if ref["commit"] == key:
            ref["commit_sha256"] = body["content_sha256"]
    put_signed(record, keys.manifest(0), manifest)
    assert any(re.search(says, text) for text in texts(record))
