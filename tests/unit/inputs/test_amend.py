"""A start with changed inputs amends the run, unless one of the run's commits used the old ones."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.errors import InputError
from pipeline.inputs.attach import attach
from pipeline.inputs.stage import prepare, stage
from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import Difference, PolicyVersion, commit_version, publish_policy
from pipeline.run import keys
from pipeline.run.amendments import AmendedError, description_at, read_amendments
from pipeline.run.attempts import end_attempt, end_attempts, read_attempt, take_attempt
from pipeline.run.commit import DataFile, commit, read_data
from pipeline.run.description import read_created
from pipeline.run.owner import this_owner
from pipeline.run.plan import publish_plan
from pipeline.run.planning import make_plan, make_validation_plan
from pipeline.run.uses import refuse_outdated
from pipeline.upkeep.verify import verify
from tests.attempts import dead_owner, living_owner
from tests.unit.inputs.small_inputs import (
    REPLAY,
    check,
    load,
    the_error,
    use,
    verl_rows,
    write_prompts,
)

MODEL = "actor_rollout_ref.model.path"


def mend_reward(settings: Path) -> bytes:
    """Write a different reward file to the same path, and return its content."""
    path = settings.parent / "reward.py"
    path.write_text(path.read_text() + "# fixed\n")
    return path.read_bytes()


def objects(store) -> dict[str, bytes]:
    return {info.key: store.read(info.key) for info in store.list("")}


def test_a_fixed_reward_function_amends_the_run(settings):
    """`retrace check` announces the amendment and writes nothing. The next start writes it once."""
    store = prepare(load(settings)).store
    take_attempt(store, load(settings), dead_owner())
    content, before = mend_reward(settings), objects(store)
    inputs = check(settings, "reward.on_error=mask")
    (note,) = [note for note in inputs.notes if "amended" in note]
    assert note.startswith(
        "the run will be amended: the reward function (custom_reward_function.path: was SHA-256 "
    )
    assert note.endswith(
        "; reward.on_error: was 'fail', now 'mask'), because it has scored no sample yet"
    )
    assert objects(store) == before

    run = stage(inputs)
    assert f"the run will be amended: {run.amended}" == note
    assert read_data(store, run.description.inputs.reward) == content
    assert run.description.setting("reward.on_error") == "mask"
    assert description_at(store, 0) == run.description
    assert store.size(keys.stop(0)) is not None, "the earlier start's workers must end"
    assert {key: value for key, value in objects(store).items() if key in before} == before

    (amendment,) = read_amendments(store)
    assert (amendment.from_step, amendment.reason) == (0, run.amended)
    again = prepare(load(settings, "reward.on_error=mask"))
    assert (again.amended, again.description) == (None, run.description)
    assert read_amendments(store) == [amendment]
    assert "reward.on_error: was 'mask', now 'fail'" in prepare(load(settings)).amended


def test_a_different_function_of_the_file_amends_the_run(settings):
    """The amendment replaces the whole section: the file's path and the function's name."""
    store = prepare(load(settings)).store
    other = settings.parent / "other.py"
    other.write_text((settings.parent / "reward.py").read_text().replace("compute_score", "mine"))
    mended = (f"custom_reward_function.path={other}", "custom_reward_function.name=mine")
    run = prepare(load(settings, *mended))
    expected = {"path": str(other), "name": "mine", "reward_kwargs": {}}
    assert run.description.setting("custom_reward_function") == expected
    assert read_created(store).setting("custom_reward_function") != expected


@pytest.mark.parametrize("used", [keys.rollout(0, 0), keys.validation(0, 1)])
def test_a_reward_function_that_has_scored_samples_cannot_be_replaced(settings, used):
    """The error suggests restoring the old file or starting a new run; either leads to a valid
    run."""
    store = prepare(load(settings)).store
    use(store, used)
    mend_reward(settings)
    lines = the_error(settings).splitlines()
    assert lines[1].startswith("  custom_reward_function.path: was SHA-256 ")
    assert lines[1].endswith(f", but {used} depends on the earlier one")
    assert lines[3] == (
        "restore the old values, or continue with the new ones in a new run, from the beginning: "
        "add trainer.experiment_name=test-2"
    )
    old = lines[2].removeprefix("  (the earlier reward file is kept as ").removesuffix(")")
    assert prepare(load(settings, f"custom_reward_function.path={old}")).amended is None
    new = lines[3].partition(": add ")[2].split()
    assert prepare(load(settings, *new)).uri.endswith("/test-2")
    assert "trainer.experiment_name=test-3" in the_error(settings), "test-2 is taken now"


def test_a_new_run_can_begin_with_the_newest_whole_policy(settings, model):
    """The advice names a new recorded set and the folder of the newest whole policy.

    The folder of a whole policy is a model; the folder of a difference is not.
    """
    recording = (f"{REPLAY}.mode=R2", f"{REPLAY}.record_file={settings.parent}/set")
    store = prepare(load(settings, *recording)).store
    use(store)
    publish_policy(store, 1, model)
    publish_policy(store, 2, model)
    for policy in (3, 4):
        of_base = Difference(policy - 1, "0" * 64)
        share = DataFile(keys.policy_share(policy, "aaaaaaaa", 0), 1, "0" * 64)
        unchanged = PolicyVersion(policy, "0" * 64, (), (share,), of_base)
        commit_version(store, unchanged, "aaaaaaaa")
    problem = the_error(settings, *recording, "trainer.seed=9")
    ways = problem.splitlines()[-1]
    assert "in a new run, from its policy 2 (with a new optimizer state): add " in ways
    new = ways.partition(": add ")[2].split()
    assert [word.partition("=")[0] for word in new] == [
        "trainer.experiment_name", MODEL, f"{REPLAY}.record_file",
    ]  # fmt: skip
    folder = new[1].partition("=")[2]
    assert (Path(folder) / "model.safetensors").is_file()
    assert "/policies/000002/" in folder
    run = prepare(load(settings, *recording, "trainer.seed=9", *new))
    assert run.uri.endswith("/test-2")


def test_prompts_may_be_fixed_until_they_have_samples(settings):
    """A published plan contains only row numbers, so the texts of its prompts may still be
    fixed."""
    run = prepare(load(settings))
    publish_plan(run.store, make_plan(load(settings), run, 0, 1))
    rows = verl_rows(10)
    rows[3]["reward_model"]["ground_truth"] = "six"
    train = write_prompts(settings.parent / "train.parquet", rows)
    amended = prepare(load(settings, "data.max_prompt_length=40"))
    assert amended.amended.startswith("the training prompts (data.train_files: had 10 prompts")
    assert amended.description.setting("data.max_prompt_length") == 40
    staged = amended.description.inputs.prompts
    found = pq.read_table(train.parent / "store/test" / staged.key)["ground_truth"].to_pylist()
    assert json.loads(found[3]) == "six"

    write_prompts(train, verl_rows(9))
    assert f", but {keys.plan(0)} was planned with the earlier one" in the_error(settings)
    write_prompts(train, rows)
    use(run.store)
    write_prompts(train, verl_rows(10))
    assert f", but {keys.rollout(0, 0)} depends on the earlier one" in the_error(settings)


def test_validation_prompts_may_change_until_a_validation(settings):
    """The user may add, change and remove validation prompts until a validation is committed, even
    while the run trains."""
    store = prepare(load(settings)).store
    for step in (0, 1):
        use(store, keys.rollout(step, 0))
        store.create(keys.manifest(step), b"{}")
    more = write_prompts(settings.parent / "more.parquet", verl_rows(3))
    with_more = load(settings, f"data.val_files={more}")
    run = prepare(with_more)
    assert run.amended.startswith("the validation prompts (data.val_files: had none, now")
    assert run.val_prompt_count == 3
    assert description_at(store, 1).inputs.val_prompts is None, "steps 0 and 1 had none"
    assert description_at(store, 2) == run.description

    publish_plan(store, make_validation_plan(with_more, run, 0, 1))
    write_prompts(more, verl_rows(4))
    assert f"but {keys.validation_plan(0)} was planned" in the_error(
        settings, f"data.val_files={more}"
    )
    assert prepare(load(settings)).description.inputs.val_prompts is None
    use(store, keys.validation(0, 0))
    found = the_error(settings, f"data.val_files={more}")
    assert f"but {keys.validation(0, 0)} depends on the earlier one" in found


def test_a_repaired_model_amends_the_run(settings, model, tmp_path):
    """Policy 0 is the amended model, although policy 0 was committed before the amendment."""
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    config = load(settings, f"{MODEL}={broken}")
    store = prepare(config).store
    commit_of_0 = store.read(keys.policy(0))
    weights.write_bytes(whole)
    run = prepare(config)
    assert run.amended.startswith(f"the model ({MODEL}: model.safetensors: was SHA-256 ")
    assert run.amended.endswith(", because no commit depends on it yet")
    fetch_policy(store, 0, tmp_path / "policy")
    assert (tmp_path / "policy/model.safetensors").read_bytes() == whole
    assert store.read(keys.policy(0)) == commit_of_0

    publish_policy(store, 1, model)
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    found = the_error(settings, f"{MODEL}={broken}")
    assert f", but {keys.policy(1)} depends on the earlier one" in found


def test_a_model_with_different_experts_is_refused(settings, model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    body = json.loads((other / "config.json").read_bytes())
    prepare(load(settings))
    (other / "config.json").write_text(json.dumps({**body, "num_experts_per_tok": 2}))
    problem = the_error(settings, f"{MODEL}={other}")
    assert '(a model with different experts: was {"experts": 16, "topk": 4,' in problem
    assert problem.endswith("from the beginning: add trainer.experiment_name=test-2")


def test_a_shard_that_is_committed_in_the_meantime_prevents_the_amendment(settings):
    """Just before the amendment is committed, a final check looks for commits that used the old
    inputs."""
    store = prepare(load(settings)).store
    mend_reward(settings)
    inputs = check(settings)
    with pytest.raises(InputError, match=f"but {keys.rollout(0, 0)} depends on"):
        stage(inputs, use)
    assert read_amendments(store) == []


def test_two_starts_at_the_same_time_amend_once_per_change(settings):
    """A second start with the same change amends nothing; one with a different change amends
    again."""
    store = prepare(load(settings)).store
    mend_reward(settings)
    first, second = check(settings), check(settings)
    third = check(settings, "reward.on_error=mask")

    def first_is_quicker(store) -> None:
        if not read_amendments(store):
            assert stage(first).amended is not None

    assert stage(second, first_is_quicker).amended is None
    assert len(read_amendments(store)) == 1
    assert stage(third).amended is not None
    assert [one.number for one in read_amendments(store)] == [0, 1]


@pytest.mark.parametrize("flow_run", ["theirs", None])
def test_another_living_owner_is_not_ended(settings, flow_run):
    """Its workers may still be generating samples."""
    config = load(settings)
    store = prepare(config).store
    mend_reward(settings)
    inputs = check(settings)
    over = [False]
    theirs, ours = living_owner(flow_run), this_owner(flow_run and "ours")

    def fence(store) -> None:
        end_attempts(store, config, ours, lambda other: over[0])

    take_attempt(store, config, theirs)
    with pytest.raises(InputError, match="is already running"):
        stage(inputs, fence)
    assert read_amendments(store) == []
    assert store.size(keys.stop(0)) is None
    over[0] = True
    if flow_run is None:
        end_attempt(store, read_attempt(store, 0), "cancelled", "Ctrl-C")
    assert stage(inputs, fence).amended is not None
    assert store.size(keys.stop(0)) is not None
    assert take_attempt(store, config, ours).attempt.number == 1


def test_a_start_does_not_end_its_own_attempt(settings):
    config = load(settings)
    store = prepare(config).store
    mend_reward(settings)
    ours = this_owner()
    take_attempt(store, config, ours)
    assert stage(check(settings), lambda store: end_attempts(store, config, ours)).amended
    assert store.size(keys.stop(0)) is None


def made_with(amendments, used):
    """Return the parts of a shard's commit that relate to amendments, as workers write them."""
    if used.startswith("steps"):
        return {"maker": {"worker": 0, "amendments": amendments}}
    return {"maker": {"worker": 0, "sources": {}}, "amendments": amendments}


@pytest.mark.parametrize("used", [keys.rollout(0, 0), keys.validation(0, 0)])
def test_a_shard_that_is_written_during_the_amendment_is_refused(settings, used):
    """The shard's commit contains the number of amendments that the worker had read."""
    store = prepare(load(settings)).store
    mend_reward(settings)
    prepare(load(settings))
    commit(store, used, made_with(0, used), "a")
    with pytest.raises(AmendedError, match=rf"{used} in .*while amendments/000\.json was being"):
        refuse_outdated(store, [used])
    problem = the_error(settings)
    said = "a worker of an earlier start committed this shard while amendments/000"
    assert f"{used}: {said}" in problem
    assert problem.endswith("from the beginning: add trainer.experiment_name=test-2")
    assert [one.key for one in verify(store).problems if "amendments/000" in one.text] == [used]

    store.delete(used)
    commit(store, used, made_with(1, used), "a")
    refuse_outdated(store, [used])
    assert prepare(load(settings)).amended is None


def test_shards_that_an_amendment_does_not_concern_are_accepted(settings):
    """A rollout shard does not depend on validation prompts."""
    store = prepare(load(settings)).store
    commit(store, keys.rollout(0, 0), {"maker": {"amendments": 0}}, "a")
    more = write_prompts(settings.parent / "more.parquet", verl_rows(3))
    prepare(load(settings, f"data.val_files={more}"))
    refuse_outdated(store, [keys.rollout(0, 0)])
    assert prepare(load(settings, f"data.val_files={more}")).amended is None


LAYOUT = "actor_rollout_ref.actor.megatron"


def test_a_different_layout_amends_the_run(settings):
    """Any start may change the layout; the change applies from the first unfinished step on."""
    store = prepare(load(settings)).store
    use(store)
    for step in range(3):
        commit(store, keys.manifest(step), {"step": step}, "00000000")
    for key in (keys.metrics(0), keys.metrics(1), keys.checkpoint(2)):
        commit(store, key, {}, "00000000")
    two = (
        "trainer.n_gpus_per_node=2",
        f"{LAYOUT}.pipeline_model_parallel_size=2",
        f"{LAYOUT}.override_transformer_config.num_layers_in_first_pipeline_stage=1",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    )
    mended = attach(check(settings, *two))
    assert mended is not None
    assert mended.inputs == ()
    assert set(mended.settings) == {
        *(item.split("=")[0] for item in (two[0], two[1], two[3])),
        f"{LAYOUT}.override_transformer_config",
    }
    run = prepare(load(settings, *two))
    assert run.amended.startswith("the parallel layout (")
    assert "trainer.n_gpus_per_node: was 1, now 2" in run.amended
    assert run.amended.endswith("), from the checkpoint of policy 2 on")
    (amendment,) = read_amendments(store)
    assert amendment.from_step == 2
    assert run.description.setting("trainer.n_gpus_per_node") == 2
    assert description_at(store, 1).setting("trainer.n_gpus_per_node") == 1
    assert prepare(load(settings, *two)).amended is None


@pytest.mark.parametrize(
    "change",
    [
        f"{LAYOUT}.override_transformer_config.moe_z_loss_coeff=0.1",
        f"{LAYOUT}.dtype=float32",
        f"{LAYOUT}.use_distributed_optimizer=false",
    ],
)
def test_settings_outside_the_layout_cannot_change(settings, change):
    """Changes to the model or its state are refused, because a checkpoint depends on them."""
    prepare(load(settings))
    assert change.split("=")[0].split(".moe_")[0] in the_error(settings, change)


def test_ep_stays_without_the_distributed_optimizer(settings):
    """Without it, checkpoints depend on EP, so EP is fixed after the first checkpoint."""
    whole = f"{LAYOUT}.use_distributed_optimizer=false"
    store = prepare(load(settings, whole)).store
    for key in (keys.metrics(0), keys.checkpoint(1)):
        commit(store, key, {}, "00000000")
    cut = (whole, f"{LAYOUT}.expert_model_parallel_size=2", "trainer.n_gpus_per_node=2")
    error = the_error(settings, *cut)
    assert "expert_model_parallel_size: was 1, now 2, but without" in error
