"""A run is amended with inputs that differ, as long as none of its commits has used them."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.errors import InputError
from pipeline.inputs.stage import prepare, stage
from pipeline.run import keys
from pipeline.run.amendments import AmendedError, description_at, read_amendments
from pipeline.run.attempts import begin_attempt, continue_attempt, end_attempts_of
from pipeline.run.commit import commit, read_data
from pipeline.run.description import read_created
from pipeline.run.plan import publish_plan
from pipeline.run.planning import make_plan, make_validation_plan
from pipeline.run.policy import fetch_policy, publish_policy
from pipeline.run.uses import refuse_outdated
from pipeline.upkeep.verify import verify
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
    """Another reward file under the same path."""
    path = settings.parent / "reward.py"
    path.write_text(path.read_text() + "# mended\n")
    return path.read_bytes()


def objects(store) -> dict[str, bytes]:
    return {info.key: store.read(info.key) for info in store.list("")}


def test_a_mended_reward_function(settings):
    """`retrace check` says it and writes nothing; the next start writes it, once."""
    store = prepare(load(settings)).store
    begin_attempt(store, load(settings))
    content, before = mend_reward(settings), objects(store)
    inputs = check(settings, "reward.on_error=mask")
    (note,) = [note for note in inputs.notes if "amended" in note]
    assert note.startswith(
        "the run will be amended: the reward function (custom_reward_function.path: it has SHA-256 "
    )
    assert note.endswith(
        "; reward.on_error: it has 'fail', now 'mask'), as it has scored no sample yet"
    )
    assert objects(store) == before

    run = stage(inputs)
    assert f"the run will be amended: {run.amended}" == note
    assert read_data(store, run.description.inputs.reward) == content
    assert run.description.setting("reward.on_error") == "mask"
    assert description_at(store, 0) == run.description
    assert store.size(keys.stop(0)) is not None, "workers of the earlier start are to end"
    assert {key: value for key, value in objects(store).items() if key in before} == before

    (amendment,) = read_amendments(store)
    assert (amendment.from_step, amendment.reason) == (0, run.amended)
    again = prepare(load(settings, "reward.on_error=mask"))
    assert (again.amended, again.description) == (None, run.description)
    assert read_amendments(store) == [amendment]
    assert "reward.on_error: it has 'mask', now 'fail'" in prepare(load(settings)).amended


def test_another_function_of_the_file(settings):
    """The name of the function and the file's path are amended with it, as a whole."""
    store = prepare(load(settings)).store
    other = settings.parent / "other.py"
    other.write_text((settings.parent / "reward.py").read_text().replace("compute_score", "mine"))
    mended = (f"custom_reward_function.path={other}", "custom_reward_function.name=mine")
    run = prepare(load(settings, *mended))
    expected = {"path": str(other), "name": "mine"}
    assert run.description.setting("custom_reward_function") == expected
    assert read_created(store).setting("custom_reward_function") != expected


@pytest.mark.parametrize("used", [keys.rollout(0, 0), keys.validation(0, 1)])
def test_a_reward_function_that_has_scored(settings, used):
    """Refused; the refusal has the old file and the settings of a new run, and both are right."""
    store = prepare(load(settings)).store
    use(store, used)
    mend_reward(settings)
    lines = the_error(settings).splitlines()
    assert lines[1].startswith("  custom_reward_function.path: it has SHA-256 ")
    assert lines[1].endswith(f", but {used} was made with the earlier one")
    assert lines[3] == (
        "go back to the old values, or go on with the new ones in a new run, from the beginning: "
        "add trainer.experiment_name=test-2"
    )
    old = lines[2].removeprefix("  (the earlier reward file is kept as ").removesuffix(")")
    assert prepare(load(settings, f"custom_reward_function.path={old}")).amended is None
    new = lines[3].partition(": add ")[2].split()
    assert prepare(load(settings, *new)).uri.endswith("/test-2")
    assert "trainer.experiment_name=test-3" in the_error(settings), "test-2 is taken now"


def test_a_new_run_from_the_newest_policy(settings, model):
    """The advice names the policy's folder, which is a model, and another recorded set."""
    recording = (f"{REPLAY}.mode=R2", f"{REPLAY}.record_file={settings.parent}/set")
    store = prepare(load(settings, *recording)).store
    use(store)
    publish_policy(store, 1, model)
    publish_policy(store, 2, model)
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


def test_prompts(settings):
    """Their texts may be mended while a plan is published, which only names rows."""
    run = prepare(load(settings))
    publish_plan(run.store, make_plan(load(settings), run, 0, 1))
    rows = verl_rows(10)
    rows[3]["reward_model"]["ground_truth"] = "six"
    train = write_prompts(settings.parent / "train.parquet", rows)
    amended = prepare(load(settings, "data.max_prompt_length=40"))
    assert amended.amended.startswith("the training prompts (data.train_files: it has 10 prompts")
    assert amended.description.setting("data.max_prompt_length") == 40
    staged = amended.description.inputs.prompts
    found = pq.read_table(train.parent / "store/test" / staged.key)["ground_truth"].to_pylist()
    assert json.loads(found[3]) == "six"

    write_prompts(train, verl_rows(9))
    assert f", but {keys.plan(0)} was planned with the earlier one" in the_error(settings)
    write_prompts(train, rows)
    use(run.store)
    write_prompts(train, verl_rows(10))
    assert f", but {keys.rollout(0, 0)} was made with the earlier one" in the_error(settings)


def test_validation_prompts(settings):
    """They may come, change and go until a validation is committed, also in a run that trains."""
    store = prepare(load(settings)).store
    for step in (0, 1):
        use(store, keys.rollout(step, 0))
        store.create(keys.manifest(step), b"{}")
    more = write_prompts(settings.parent / "more.parquet", verl_rows(3))
    with_more = load(settings, f"data.val_files={more}")
    run = prepare(with_more)
    assert run.amended.startswith("the validation prompts (data.val_files: it has none, now")
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
    assert f"but {keys.validation(0, 0)} was made" in the_error(settings, f"data.val_files={more}")


def test_a_repaired_model(settings, model, tmp_path):
    """Policy 0 is the amended model, though its commit was written before."""
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
    assert run.amended.startswith(f"the model ({MODEL}: model.safetensors: it has SHA-256 ")
    assert run.amended.endswith(", as nothing was made of it yet")
    fetch_policy(store, 0, tmp_path / "policy")
    assert (tmp_path / "policy/model.safetensors").read_bytes() == whole
    assert store.read(keys.policy(0)) == commit_of_0

    publish_policy(store, 1, model)
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert f", but {keys.policy(1)} was made" in the_error(settings, f"{MODEL}={broken}")


def test_a_model_of_other_experts(settings, model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    body = json.loads((other / "config.json").read_bytes())
    prepare(load(settings))
    (other / "config.json").write_text(json.dumps({**body, "num_experts_per_tok": 2}))
    problem = the_error(settings, f"{MODEL}={other}")
    assert "(a model of other experts: Geometry(experts=16, topk=4," in problem
    assert problem.endswith("from the beginning: add trainer.experiment_name=test-2")


def test_a_shard_that_is_committed_meanwhile(settings):
    """Between the check and the amendment: the last look is right before the commit."""
    store = prepare(load(settings)).store
    mend_reward(settings)
    inputs = check(settings)
    with pytest.raises(InputError, match=f"but {keys.rollout(0, 0)} was made"):
        stage(inputs, use)
    assert read_amendments(store) == []


def test_two_starts_at_once(settings):
    """With the same change the second finds nothing left to amend; with another it amends again."""
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


def test_another_flow_run_at_work_is_not_ended(settings):
    """On a cluster: its workers may still be making samples."""
    config = load(settings)
    store = prepare(config).store
    mend_reward(settings)
    inputs = check(settings)
    over: set[str] = set()

    def fence(store) -> None:
        end_attempts_of(config, "ours", over.__contains__, store)

    continue_attempt("theirs", over.__contains__, store, config)
    with pytest.raises(InputError, match="is at work in flow run theirs"):
        stage(inputs, fence)
    assert read_amendments(store) == []
    assert store.size(keys.stop(0)) is None
    over.add("theirs")
    assert stage(inputs, fence).amended is not None
    assert store.size(keys.stop(0)) is not None
    assert continue_attempt("ours", over.__contains__, store, config).number == 1


@pytest.mark.parametrize("used", [keys.rollout(0, 0), keys.validation(0, 0)])
def test_a_shard_on_its_way_while_the_run_is_amended(settings, used):
    """Its commit says how many amendments its maker knew; it is refused, never trained on."""
    store = prepare(load(settings)).store
    mend_reward(settings)
    prepare(load(settings))
    body = {"maker": {"amendments": 0}} if used.startswith("steps") else {"amendments": 0}
    commit(store, used, body, "a")
    with pytest.raises(AmendedError, match=rf"{used} in .*while amendments/000\.json was being"):
        refuse_outdated(store, [used])
    problem = the_error(settings)
    assert f"{used}: a worker of an earlier start committed it while amendments/000" in problem
    assert problem.endswith("from the beginning: add trainer.experiment_name=test-2")
    assert [one.key for one in verify(store).problems if "amendments/000" in one.text] == [used]

    store.delete(used)
    known = {"amendments": 1}
    commit(store, used, {"maker": known} if used.startswith("steps") else known, "a")
    refuse_outdated(store, [used])
    assert prepare(load(settings)).amended is None


def test_shards_that_an_amendment_does_not_concern(settings):
    """Steps know nothing of validation prompts."""
    store = prepare(load(settings)).store
    commit(store, keys.rollout(0, 0), {"maker": {"amendments": 0}}, "a")
    more = write_prompts(settings.parent / "more.parquet", verl_rows(3))
    prepare(load(settings, f"data.val_files={more}"))
    refuse_outdated(store, [keys.rollout(0, 0)])
    assert prepare(load(settings, f"data.val_files={more}")).amended is None
