"""Recorded sets as inputs: a replay_file must match the samples that the run would plan, and a
record_file belongs to one run."""

import io
import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.inputs.check import check_inputs
from pipeline.inputs.stage import StagedRun
from pipeline.policies.versions import weights_of
from pipeline.policies.weights import parse_header
from pipeline.run import keys
from pipeline.run.commit import (
    new_write_id,
    read_commit,
    read_data,
)
from pipeline.run.plan import publish_plan
from pipeline.run.planning import make_plan
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
from tests.stored_runs import put_signed
from tests.unit.inputs.small_inputs import (
    R3,
    REPLAY,
    change_of,
    check,
    load,
    prepare,
    the_error,
    verl_rows,
    write_prompts,
)
from tests.weights import digest_of


def sample_step(run: StagedRun, config, step: int, weights: bool = True) -> None:
    """Write and seal a step with routes, as rollout workers do.

    If `weights` is true, the shard's commit contains the weights digest of its policy.
    """
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


def test_a_matching_set_is_accepted(settings, recorded):
    """The same settings plan the same samples, so the set matches. No reward file is needed."""
    text = settings.read_text().replace("custom_reward_function", "reward") + "\n"
    settings.write_text(
        "\n".join(line for line in text.splitlines() if not line.startswith("reward"))
    )
    run = prepare(load(settings, *R3, f"{REPLAY}.replay_file={recorded}"))
    assert run.description.inputs.reward is None


@pytest.fixture
def permuted(model, tmp_path):
    """The same model with one layer's router rows reversed.

    The router chooses different experts, but all shapes are equal.
    """
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
    """With permuted gates, all shapes and tokens match; only the weights digest differs."""
    replay = (*R3, f"{REPLAY}.replay_file={recorded}", f"actor_rollout_ref.model.path={permuted}")
    theirs, ours = (digest_of(folder) for folder in (model, permuted))
    assert the_error(settings, *replay) == (
        f"{REPLAY}.replay_file: replay_file {recorded}, step 0: policy 0 has weights "
        f"{theirs}, this run's policy 0 has {ours}; use the actor_rollout_ref.model.path of the "
        f"set's run, or set {REPLAY}.replay_other_weights=True"
    )
    allowed = prepare(load(settings, *replay, f"{REPLAY}.replay_other_weights=True"))
    assert allowed.notes == ()
    assert weights_of(allowed.store, 0) == ours


def test_equal_tensors_in_different_files_are_the_same_weights(settings, model, recorded, tmp_path):
    """A policy that ranks published in shares consists of several files."""
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
    """Sets in format 1.0 do not contain weights digests."""
    config = load(settings, *R3, "trainer.experiment_name=recorded")
    run = prepare(config)
    for step in range(2):
        sample_step(run, config, step, weights=False)
    replay = (*R3, f"{REPLAY}.replay_file={run.uri}", f"actor_rollout_ref.model.path={permuted}")
    (note,) = check(settings, *replay).notes
    assert note == (
        f"{REPLAY}.replay_file: {run.uri} does not name the weights of its policy 0, so they are "
        "not compared with this run's"
    )
    assert not check(settings, *replay, f"{REPLAY}.replay_other_weights=True").notes


def test_a_set_of_a_run_whose_model_was_amended_is_accepted(settings, model, permuted, tmp_path):
    """Policy 0 of that run is the amended model, although the commit of policy 0 names the original
    model."""
    changing = tmp_path / "changing"
    shutil.copytree(permuted, changing)
    of_set = (*R3, "trainer.experiment_name=amended", f"actor_rollout_ref.model.path={changing}")
    prepare(load(settings, *of_set))
    shutil.copy(model / "model.safetensors", changing)
    config = load(settings, *of_set)
    run = prepare(config)
    assert change_of(run)
    for step in range(2):
        sample_step(run, config, step)
    replay = (*R3, f"{REPLAY}.replay_file={run.uri}")
    assert check(settings, *replay).notes == ()
    problem = the_error(settings, *replay, f"actor_rollout_ref.model.path={permuted}")
    assert f"weights {digest_of(model)}, this run's" in problem


def test_too_few_steps_are_refused(settings, recorded):
    problem = the_error(
        settings, *R3, f"{REPLAY}.replay_file={recorded}", "trainer.total_training_steps=3"
    )
    assert problem.startswith(
        f"{REPLAY}.replay_file: {recorded} lacks objects for step 2, but "
        "trainer.total_training_steps is 3: "
    )
    assert problem.endswith(
        "; lower trainer.total_training_steps to 2, or set it to the place of a complete set"
    )


def test_a_missing_set_is_refused(settings, tmp_path):
    problem = the_error(settings, *R3, f"{REPLAY}.replay_file={tmp_path}/nothing")
    assert problem.startswith(f"{REPLAY}.replay_file: {tmp_path}/nothing lacks objects for step 0")


def test_token_digests_that_do_not_match_are_refused(settings, recorded):
    """The same prompt ids have different texts, so all shapes match, but the digests do not."""
    rows = verl_rows(10)
    for row in rows:
        row["prompt"][0]["content"] = row["prompt"][0]["content"].replace("+", "-")
    write_prompts(settings.parent / "train.parquet", rows)
    problem = the_error(settings, *R3, f"{REPLAY}.replay_file={recorded}")
    assert problem.startswith(f"{REPLAY}.replay_file: replay_file {recorded}, step 0: sample ")
    assert "token digest" in problem
    assert "use the data.train_files" in problem


def test_different_samples_are_refused(settings, recorded):
    """A different seed plans different prompts."""
    problem = the_error(settings, *R3, f"{REPLAY}.replay_file={recorded}", "data.seed=2")
    assert f"{REPLAY}.replay_file: replay_file {recorded}, step 0" in problem


def test_different_sampling_is_refused(settings, recorded):
    """Log-probs at different temperatures cannot be compared."""
    problem = the_error(
        settings,
        *R3,
        f"{REPLAY}.replay_file={recorded}",
        "actor_rollout_ref.rollout.temperature=0.5",
    )
    assert "step 0: sampled with temperature 1.0, but this run uses 0.5" in problem
    assert "set actor_rollout_ref.rollout.temperature=1.0" in problem


def test_unknown_sampling_is_noted(settings, recorded):
    """A set that lacks one of its plans is accepted with a note."""
    open_store(recorded).delete(keys.plan(1))
    (note,) = check(settings, *R3, f"{REPLAY}.replay_file={recorded}").notes
    assert "contains no plan.json for 1 of 2 steps; their temperature, top_p and top_k are" in note


def test_a_plan_without_sampling_settings_is_refused(settings, recorded):
    store = open_store(recorded)
    body = read_commit(store, keys.plan(0))
    del body["sampling"]
    put_signed(store, keys.plan(0), body)
    problem = the_error(settings, *R3, f"{REPLAY}.replay_file={recorded}")
    assert f"{keys.plan(0)} in {recorded}: not the plan" in problem
    assert "sampling" in problem


@pytest.mark.parametrize("content", [None, b"cut off"])
def test_an_incomplete_set_is_refused(settings, recorded, content):
    """A set that was copied without its routes is refused before anything starts."""
    store = open_store(recorded)
    key = next(info.key for info in store.list("steps/000001") if "routes" in info.key)
    store.delete(key)
    if content is not None:
        store.create(key, content)
    problem = the_error(settings, *R3, f"{REPLAY}.replay_file={recorded}")
    assert key in problem
    assert ("no such object" if content is None else "7 bytes, but its commit records") in problem


def test_routes_of_a_different_mode_are_refused(settings, recorded):
    problem = the_error(settings, f"{REPLAY}.mode=R2", f"{REPLAY}.replay_file={recorded}")
    assert f"{REPLAY}.replay_file: " in problem


def test_a_new_run_does_not_write_into_an_old_set(settings, recorded):
    """A set belongs to one run, and only that run may continue to write it."""
    record = (*R3, f"{REPLAY}.record_file={recorded}")
    assert the_error(settings, *record).startswith(
        f"{REPLAY}.record_file: {recorded} already contains a recorded set (steps/000000/manifest"
    )
    fresh = (*R3, f"{REPLAY}.record_file={settings.parent}/set")
    config = load(settings, *fresh)
    run = prepare(config)
    open_store(f"{settings.parent}/set").create(keys.manifest(0), b"{}")
    assert check_inputs(config).store.uri == run.uri


def test_an_unwritable_set_is_refused(settings):
    assert f"{REPLAY}.record_file: found {settings}/set, which cannot be written" in the_error(
        settings, *R3, f"{REPLAY}.record_file={settings}/set"
    )
