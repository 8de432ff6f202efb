"""Recorded sets as inputs: a replay_file is compared with what the run would sample, and a
record_file is one run's."""

import io
import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.inputs.check import check_inputs
from pipeline.inputs.stage import StagedRun, prepare
from pipeline.run import keys
from pipeline.run.commit import new_write_id, read_commit, read_data
from pipeline.run.plan import publish_plan
from pipeline.run.planning import make_plan
from pipeline.run.policy import digests_of, weights_of
from pipeline.run.weights import parse_header
from pipeline.store import open_store
from pipeline.traces import (
    Provenance,
    Routes,
    Sample,
    VersionSpan,
    expected_ids,
    sampling_seed,
    seal,
    write_shard,
)
from tests.unit.inputs.small_inputs import (
    R3,
    REPLAY,
    check,
    load,
    the_error,
    verl_rows,
    write_prompts,
)


def sample_step(run: StagedRun, config, step: int, weights: bool = True) -> None:
    """Make and seal a step as the rollout workers would, with routes; they know the weights."""
    plan = make_plan(config, run, step, shards=1)
    data = read_data(run.store, run.description.inputs.prompts)
    tokens = pq.read_table(io.BytesIO(data))["token_ids"].to_pylist()
    samples = []
    for id in expected_ids(plan):
        group, _, _ = id.rpartition("/")
        name = group.split("/")[1]
        prompt = np.array(tokens[int(name.split(".")[0])], np.uint32)
        rows = len(prompt) + 2
        sets = np.tile(np.arange(4, dtype=np.uint8), (rows, 3, 1))
        samples.append(
            Sample(
                id,
                group,
                name,
                prompt,
                np.arange(3, dtype=np.uint32),
                np.ones(3, bool),
                np.zeros(3, np.float32),
                "stop",
                (VersionSpan(step, 0, 3),),
                sampling_seed(config.trainer.seed, id),
                1.0,
                None,
                {},
                Routes(sets, np.ones(rows, bool)),
            )
        )
    provenance = Provenance("R3", step, "test")
    publish_plan(run.store, plan)
    policies = {step: weights_of(run.store, 0) if step == 0 else "1" * 64} if weights else None
    write_shard(
        run.store,
        step,
        0,
        new_write_id(),
        samples,
        run.geometry,
        provenance,
        policies=policies,
    )
    seal(run.store, step, 1, lambda _: expected_ids(plan), step)


@pytest.fixture
def recorded(settings) -> str:
    """The URI of a run with two sealed steps."""
    config = load(settings, *R3, "trainer.experiment_name=recorded")
    run = prepare(config)
    for step in range(2):
        sample_step(run, config, step)
    return run.uri


def test_replay(settings, recorded):
    """The same settings plan the same samples, so the set fits; no reward file is needed."""
    text = settings.read_text().replace("custom_reward_function", "reward") + "\n"
    settings.write_text(
        "\n".join(line for line in text.splitlines() if not line.startswith("reward"))
    )
    run = prepare(load(settings, *R3, f"{REPLAY}.replay_file={recorded}"))
    assert run.description.inputs.reward is None


@pytest.fixture
def permuted(model, tmp_path):
    """The same model with the router of one layer turned around: other experts, equal shapes."""
    folder = tmp_path / "permuted"
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    gates = [t for t in parse_header(bytes(data[8:begin])) if t.name.endswith("mlp.gate.weight")]
    _, dtype, (experts, hidden), start, end = gates[0]
    rows = np.frombuffer(data[begin + start : begin + end], np.uint8).reshape(experts, -1)
    assert (dtype, rows.shape[1]) in (("F32", 4 * hidden), ("BF16", 2 * hidden))
    data[begin + start : begin + end] = rows[::-1].tobytes()
    path.write_bytes(data)
    return folder


def test_other_weights_of_policy_0_are_refused_unless_allowed(settings, model, recorded, permuted):
    """Permuted gates fit in every shape and token; only the weights tell."""
    replay = (*R3, f"{REPLAY}.replay_file={recorded}", f"actor_rollout_ref.model.path={permuted}")
    theirs, ours = (digests_of(folder).weights for folder in (model, permuted))
    assert the_error(settings, *replay) == (
        f"{REPLAY}.replay_file: replay_file {recorded}, step 0: its policy 0 has the weights "
        f"{theirs}, this run's has {ours}; use the actor_rollout_ref.model.path of the set's run, "
        f"or set {REPLAY}.replay_other_weights=True"
    )
    allowed = prepare(load(settings, *replay, f"{REPLAY}.replay_other_weights=True"))
    assert allowed.notes == ()
    assert weights_of(allowed.store, 0) == ours


def test_the_same_tensors_in_other_files_are_the_same_weights(settings, model, recorded, tmp_path):
    """As a policy that was published in shards."""
    library = pytest.importorskip("safetensors")
    writer = pytest.importorskip("safetensors.torch")
    folder = tmp_path / "cut"
    shutil.copytree(model, folder)
    with library.safe_open(folder / "model.safetensors", framework="pt") as source:
        tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in halves.items():
        writer.save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in halves.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = check(
        settings,
        *R3,
        f"{REPLAY}.replay_file={recorded}",
        f"actor_rollout_ref.model.path={folder}",
    )
    assert found.notes == ()


def test_a_set_that_names_no_weights_is_replayed_with_a_note(settings, permuted):
    """As sets of format 1.0 are."""
    config = load(settings, *R3, "trainer.experiment_name=recorded")
    run = prepare(config)
    for step in range(2):
        sample_step(run, config, step, weights=False)
    replay = (*R3, f"{REPLAY}.replay_file={run.uri}", f"actor_rollout_ref.model.path={permuted}")
    (note,) = check(settings, *replay).notes
    assert note == (
        f"{REPLAY}.replay_file: {run.uri} does not say which weights its policy 0 had; whether "
        "they are this run's is not checked"
    )
    assert not check(settings, *replay, f"{REPLAY}.replay_other_weights=True").notes


def test_a_set_of_a_run_whose_model_was_amended(settings, model, permuted, tmp_path):
    """Its policy 0 is the amended model, though its commit names the first one."""
    changing = tmp_path / "changing"
    shutil.copytree(permuted, changing)
    of_set = (*R3, "trainer.experiment_name=amended", f"actor_rollout_ref.model.path={changing}")
    prepare(load(settings, *of_set))
    shutil.copy(model / "model.safetensors", changing)
    config = load(settings, *of_set)
    run = prepare(config)
    assert run.amended
    for step in range(2):
        sample_step(run, config, step)
    replay = (*R3, f"{REPLAY}.replay_file={run.uri}")
    assert check(settings, *replay).notes == ()
    problem = the_error(settings, *replay, f"actor_rollout_ref.model.path={permuted}")
    assert f"weights {digests_of(model).weights}, this run's" in problem


def test_too_few_steps(settings, recorded):
    problem = the_error(
        settings, *R3, f"{REPLAY}.replay_file={recorded}", "trainer.total_training_steps=3"
    )
    assert problem.startswith(
        f"{REPLAY}.replay_file: {recorded} lacks objects of step 2, but "
        "trainer.total_training_steps is 3: "
    )
    assert problem.endswith("; write 2 steps, or the place of a complete set")


def test_no_set(settings, tmp_path):
    problem = the_error(settings, *R3, f"{REPLAY}.replay_file={tmp_path}/nothing")
    assert problem.startswith(f"{REPLAY}.replay_file: {tmp_path}/nothing lacks objects of step 0")


def test_token_digests_that_do_not_match(settings, recorded):
    """The same prompt ids with other texts: every shape fits, the digests do not."""
    rows = verl_rows(10)
    for row in rows:
        row["prompt"][0]["content"] = row["prompt"][0]["content"].replace("+", "-")
    write_prompts(settings.parent / "train.parquet", rows)
    problem = the_error(settings, *R3, f"{REPLAY}.replay_file={recorded}")
    assert problem.startswith(f"{REPLAY}.replay_file: replay_file {recorded}, step 0: sample ")
    assert "token digest" in problem
    assert "use the data.train_files" in problem


def test_other_samples(settings, recorded):
    """Another seed plans other prompts."""
    problem = the_error(settings, *R3, f"{REPLAY}.replay_file={recorded}", "data.seed=2")
    assert f"{REPLAY}.replay_file: replay_file {recorded}, step 0" in problem


def test_other_sampling(settings, recorded):
    """Log-probs of another temperature are not comparable with the trainer's."""
    problem = the_error(
        settings,
        *R3,
        f"{REPLAY}.replay_file={recorded}",
        "actor_rollout_ref.rollout.temperature=0.5",
    )
    assert "step 0: sampled with temperature 1.0, this run has 0.5" in problem
    assert "set actor_rollout_ref.rollout.temperature=1.0" in problem


def test_unknown_sampling(settings, recorded):
    """A set that does not say how it was sampled is accepted, with a note."""
    open_store(recorded).delete(keys.plan(1))
    (note,) = check(settings, *R3, f"{REPLAY}.replay_file={recorded}").notes
    assert "does not say how 1 of 2 steps were sampled" in note


def test_plan_without_sampling(settings, recorded):
    store = open_store(recorded)
    body = read_commit(store, keys.plan(0))
    store.delete(keys.plan(0))
    del body["sampling"], body["content_sha256"]
    store.create(keys.plan(0), json.dumps(body).encode())
    problem = the_error(settings, *R3, f"{REPLAY}.replay_file={recorded}")
    assert f"{keys.plan(0)} in {recorded}: not the plan" in problem
    assert "it has no 'sampling'" in problem


@pytest.mark.parametrize("content", [None, b"cut off"])
def test_a_file_is_not_whole(settings, recorded, content):
    """A set copied without its routes is told before anything starts."""
    store = open_store(recorded)
    key = next(info.key for info in store.list("steps/000001") if "routes" in info.key)
    store.delete(key)
    if content is not None:
        store.create(key, content)
    problem = the_error(settings, *R3, f"{REPLAY}.replay_file={recorded}")
    assert key in problem
    assert ("no such object" if content is None else "7 bytes, its commit says") in problem


def test_routes_of_the_other_kind(settings, recorded):
    problem = the_error(settings, f"{REPLAY}.mode=R2", f"{REPLAY}.replay_file={recorded}")
    assert f"{REPLAY}.replay_file: " in problem


def test_a_new_run_does_not_write_into_an_old_set(settings, recorded):
    """A set is one run's; going on with the run that writes it is no conflict."""
    record = (*R3, f"{REPLAY}.record_file={recorded}")
    assert the_error(settings, *record).startswith(
        f"{REPLAY}.record_file: {recorded} already holds a set (steps/000000/manifest"
    )
    fresh = (*R3, f"{REPLAY}.record_file={settings.parent}/set")
    config = load(settings, *fresh)
    run = prepare(config)
    open_store(f"{settings.parent}/set").create(keys.manifest(0), b"{}")
    assert check_inputs(config).store.uri == run.uri


def test_unwritable_set(settings):
    assert f"{REPLAY}.record_file: found {settings}/set, which cannot be written" in the_error(
        settings, *R3, f"{REPLAY}.record_file={settings}/set"
    )
