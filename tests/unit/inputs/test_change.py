"""A start may change a run's layout, and its inputs while nothing is committed."""

import json
import shutil
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.errors import InputError
from pipeline.inputs.attach import attach
from pipeline.inputs.stage import staged_change
from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import Difference, PolicyVersion, commit_version, publish_policy
from pipeline.run import keys
from pipeline.run.attempts import read_attempt, take_attempt
from pipeline.run.commit import DataFile, commit, read_data
from pipeline.run.description import description_now, read_created
from pipeline.run.plan import publish_plan
from pipeline.run.planning import make_plan
from pipeline.run.uses import ATTEMPT, SupersededError, refuse_outdated, refuse_superseded
from pipeline.upkeep.verify import verify
from tests.attempts import dead_owner, living_owner
from tests.unit.inputs.small_inputs import (
    REPLAY,
    check,
    load,
    prepare,
    the_error,
    use,
    verl_rows,
    write_prompts,
)

MODEL = "actor_rollout_ref.model.path"
LAYOUT = "actor_rollout_ref.actor.megatron"


def mend_reward(settings: Path) -> bytes:
    """Write a different reward file to the same path, and return its content."""
    path = settings.parent / "reward.py"
    path.write_text(path.read_text() + "# fixed\n")
    return path.read_bytes()


def objects(store) -> dict[str, bytes]:
    return {info.key: store.read(info.key) for info in store.list("")}


def test_a_fixed_reward_function_is_staged_again(settings):
    """`retrace check` announces the change and writes nothing. The next start's attempt has it."""
    store = prepare(load(settings)).store
    content, before = mend_reward(settings), objects(store)
    inputs = check(settings, "reward.on_error=mask")
    [note] = [note for note in inputs.notes if "the run will change" in note]
    assert "custom_reward_function.path" in note
    assert "reward.on_error: was 'fail', now 'mask'" in note
    assert objects(store) == before

    run = prepare(load(settings, "reward.on_error=mask"))
    attempt = read_attempt(store, 1)
    assert f"the run will change: {attempt.reason}" == note
    assert attempt.changes.keys() == {"inputs.reward", "reward.on_error"}
    assert attempt.inputs_since == 1
    assert read_data(store, run.description.inputs.reward) == content
    assert run.description.setting("reward.on_error") == "mask"
    assert description_now(store) == run.description
    assert read_created(store).setting("reward.on_error") == "fail"
    assert store.size(keys.stop(0)) is not None, "the earlier start's workers must end"
    assert {key: value for key, value in objects(store).items() if key in before} == before

    prepare(load(settings, "reward.on_error=mask"))
    again = read_attempt(store, 2)
    assert (again.changes, again.inputs_since, again.reason) == (attempt.changes, 1, "")


@pytest.mark.parametrize("used", [keys.rollout(0, 0), keys.validation(0, 1)])
def test_inputs_stay_once_something_is_committed(settings, used):
    """The error offers the old file, or a new run; either leads to a valid run."""
    store = prepare(load(settings)).store
    use(store, used)
    mend_reward(settings)
    lines = the_error(settings).splitlines()
    assert lines[1].endswith(f", but {used} depends on the earlier one")
    old = lines[2].removeprefix("  (the earlier reward file is kept as ").removesuffix(")")
    prepare(load(settings, f"custom_reward_function.path={old}"))
    assert read_attempt(store, 1).reason == ""
    new = lines[3].partition(": add ")[2].split()
    assert prepare(load(settings, *new)).uri.endswith("/test-2")


def test_validation_prompts_may_change_until_a_validation(settings):
    """Also while the run trains; its rollout shards stay valid."""
    store = prepare(load(settings)).store
    use(store)
    more = write_prompts(settings.parent / "more.parquet", verl_rows(3))
    assert prepare(load(settings, f"data.val_files={more}")).val_prompt_count == 3
    refuse_outdated(store, [keys.rollout(0, 0)])
    use(store, keys.validation(0, 0))
    write_prompts(more, verl_rows(4))
    assert keys.validation(0, 0) in the_error(settings, f"data.val_files={more}")


def test_a_new_run_can_begin_with_the_newest_whole_policy(settings, model):
    """The advice names a new recorded set and the folder of the newest whole policy.

    The folder of a whole policy is a model; the folder of a difference is not.
    """
    recording = (f"{REPLAY}.mode=R2", f"{REPLAY}.record_file={settings.parent}/set")
    store = prepare(load(settings, *recording)).store
    use(store)
    publish_policy(store, 1, model)
    publish_policy(store, 2, model)
    share = DataFile(keys.policy_share(3, "aaaaaaaa", 0), 1, "0" * 64)
    difference = PolicyVersion(3, "0" * 64, (), (share,), Difference(2, "0" * 64))
    commit_version(store, difference, "aaaaaaaa")
    new = the_error(settings, *recording, "trainer.seed=9").rpartition(": add ")[2].split()
    assert [word.partition("=")[0] for word in new] == [
        "trainer.experiment_name", MODEL, f"{REPLAY}.record_file",
    ]  # fmt: skip
    assert "/policies/000002/" in new[1]
    run = prepare(load(settings, *recording, "trainer.seed=9", *new))
    assert run.uri.endswith("/test-2")


def test_prompts_may_be_fixed_until_something_is_committed(settings):
    """A published plan contains only row numbers, so the texts of its prompts may be fixed."""
    run = prepare(load(settings))
    publish_plan(run.store, make_plan(load(settings), run, 0, 1))
    rows = verl_rows(10)
    rows[3]["reward_model"]["ground_truth"] = "six"
    train = write_prompts(settings.parent / "train.parquet", rows)
    changed = prepare(load(settings, "data.max_prompt_length=40"))
    assert changed.description.setting("data.max_prompt_length") == 40
    staged = changed.description.inputs.prompts
    found = pq.read_table(train.parent / "store/test" / staged.key)["ground_truth"].to_pylist()
    assert json.loads(found[3]) == "six"

    write_prompts(train, verl_rows(9))
    assert f", but {keys.plan(0)} was planned with the earlier one" in the_error(settings)


def test_a_repaired_model_becomes_policy_0(settings, model, tmp_path):
    """Policy 0 is the model of the newest attempt, although its commit names the earlier one."""
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    config = load(settings, f"{MODEL}={broken}")
    store = prepare(config).store
    commit_of_0 = store.read(keys.policy(0))
    weights.write_bytes(whole)
    prepare(config)
    assert read_attempt(store, 1).changes.keys() == {"inputs.model"}
    fetch_policy(store, 0, tmp_path / "policy")
    assert (tmp_path / "policy/model.safetensors").read_bytes() == whole
    assert store.read(keys.policy(0)) == commit_of_0
    assert verify(store).problems == []


def test_a_model_with_different_experts_is_refused(settings, model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    body = json.loads((other / "config.json").read_bytes())
    prepare(load(settings))
    (other / "config.json").write_text(json.dumps({**body, "num_experts_per_tok": 2}))
    assert '"topk": 4' in the_error(settings, f"{MODEL}={other}")


def test_a_commit_in_the_meantime_prevents_the_change(settings):
    """Right before the attempt begins, a final check looks for commits."""
    store = prepare(load(settings)).store
    mend_reward(settings)
    inputs = check(settings)

    def change():
        use(store)
        return staged_change(inputs)

    with pytest.raises(InputError, match=keys.rollout(0, 0)):
        take_attempt(store, inputs.config, dead_owner(), change=change)
    assert store.size(keys.attempt(1)) is None


def test_another_living_owner_is_not_ended(settings):
    """Its workers may still be generating samples."""
    store = prepare(load(settings)).store
    take_attempt(store, load(settings), living_owner())
    mend_reward(settings)
    inputs = check(settings)
    change = partial(staged_change, inputs)
    with pytest.raises(InputError, match="is already running"):
        take_attempt(store, inputs.config, dead_owner(), change=change)
    assert store.size(keys.stop(1)) is None


def test_a_shard_of_the_earlier_inputs_is_refused(settings):
    """A worker looks for a later attempt before it commits; its commit may still be on its way."""
    store = prepare(load(settings)).store
    mend_reward(settings)
    refuse_superseded(store, 0)
    prepare(load(settings))
    with pytest.raises(SupersededError):
        refuse_superseded(store, 0)
    refuse_superseded(store, 1)
    for used in (keys.rollout(0, 0), keys.validation(0, 0)):
        commit(store, used, {"maker": {ATTEMPT: 0}}, "a")
        with pytest.raises(SupersededError, match=used):
            refuse_outdated(store, [used])
        store.delete(used)
        commit(store, used, {"maker": {ATTEMPT: 1}}, "a")
        refuse_outdated(store, [used])


def test_any_start_may_change_the_layout(settings):
    store = prepare(load(settings)).store
    use(store)
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
    run = prepare(load(settings, *two))
    attempt = read_attempt(store, 1)
    assert set(attempt.changes) == {
        *(item.split("=")[0] for item in (two[0], two[1], two[3])),
        f"{LAYOUT}.override_transformer_config",
    }
    assert attempt.inputs_since == 0
    assert attempt.reason.endswith("from the checkpoint of policy 2 on")
    assert run.description.setting("trainer.n_gpus_per_node") == 2
    refuse_outdated(store, [keys.rollout(0, 0)])


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
    assert "expert_model_parallel_size: was 1, now 2" in the_error(settings, *cut)
