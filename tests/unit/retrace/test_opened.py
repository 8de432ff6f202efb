"""`retrace.open_run` on runs and recorded sets."""

import re

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import retrace
from pipeline.policies.versions import publish_policy
from pipeline.recorded import write_recorded_set
from pipeline.report.run_metrics import Validation
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from pipeline.run.plan import publish_plan
from pipeline.upkeep.prune import prune
from tests.attempts import make_attempt
from tests.samples import (
    GEOMETRY,
    equal,
    make_samples,
    make_validation_plan,
    sealed_r2,
    sealed_r3,
    without_routes,
    write_run,
)
from tests.stored_runs import long_run
from tests.weights import some_weights

SAMPLES = make_samples()
WORDS = Tokenizer(WordLevel({f"word{i}": i for i in range(100)}, unk_token="word0"))


@pytest.fixture(params=["R3", "R2"])
def run(request, tmp_path):
    store = retrace.open_store(str(tmp_path / "run"))
    write_run(store, SAMPLES, request.param, WORDS.to_str().encode())
    (sealed_r3 if request.param == "R3" else sealed_r2)(store, SAMPLES)
    return retrace.open_run(store.uri)


@pytest.fixture
def recorded(run, tmp_path):
    """A recorded set, copied from the run."""
    store = retrace.open_store(str(tmp_path / "set"))
    write_recorded_set(run.store, store, 0)
    return retrace.open_run(store.uri)


def test_samples_have_tokens_text_reward_and_routes(run):
    """The routes are those used in training: in R2 the trainer's own, in R3 the engine's."""
    step = run.step(0)
    found = {sample.id: sample for sample in step.samples()}
    assert sorted(found) == sorted(sample.id for sample in SAMPLES)
    for expected in SAMPLES:
        sample = found[expected.id]
        assert np.array_equal(sample.tokens_S, expected.tokens_S)
        assert sample.reward == expected.reward
        assert equal(sample.routes, expected.routes)
        assert sample.routes.sets_TLK.shape == (len(expected.tokens_S) - 1, 3, 4)
        assert sample.prompt_text == " ".join(f"word{i}" for i in expected.prompt_tokens_P)
        assert sample.response_text == run.text(expected.response_tokens_G)
    assert step.manifest.geometry == GEOMETRY
    assert (step.number, step.pruned, run.steps()) == (0, False, [0])


def test_samples_that_were_read_can_be_written_again(run, tmp_path):
    manifest = run.step(0).manifest
    copy = retrace.open_store(str(tmp_path / "copy"))
    samples = list(run.step(0).samples())
    retrace.traces.write_step(copy, 0, samples, manifest.geometry, manifest.provenance)
    found = {sample.id: sample for sample in retrace.open_run(copy.uri).step(0).samples()}
    assert len(found) == len(samples) == len(SAMPLES)
    for sample in samples:
        assert np.array_equal(found[sample.id].tokens_S, sample.tokens_S)
        assert equal(found[sample.id].routes, sample.routes)


def test_some_samples_and_layers_can_be_read(run):
    step = run.step(0)
    ids = [SAMPLES[4].id, SAMPLES[1].id]
    some = list(step.samples(ids, layers=[5]))
    assert [sample.id for sample in some] == ids
    assert np.array_equal(
        some[0].routes.sets_TLK[SAMPLES[4].routes.valid_T],
        SAMPLES[4].routes.sets_TLK[SAMPLES[4].routes.valid_T][:, [2]],
    )
    assert step.sample(ids[0], layers=()).routes is None
    with pytest.raises(retrace.TraceError, match=r"no routes for layers \[3\]"):
        step.sample(ids[0], layers=[3])
    with pytest.raises(retrace.TraceError, match="000000/9/0"):
        step.sample("000000/9/0")


def test_ids_and_layers_may_come_from_a_generator(run, monkeypatch):
    """Each is read once, although the samples are read in several batches."""
    monkeypatch.setattr("pipeline.traces.format.manifest._BATCH_SAMPLES", 1)
    step = run.step(0)
    ids = [SAMPLES[4].id, SAMPLES[1].id]
    expected = list(step.samples(ids, [5]))
    found = list(step.samples(iter(ids), (layer for layer in [5])))
    assert [sample.id for sample in found] == ids
    assert all(equal(a.routes, b.routes) for a, b in zip(found, expected, strict=True))
    assert [sample.id for sample in step.samples({ids[0]})] == ids[:1]


def test_ids_and_layers_of_other_types_are_refused(run):
    step = run.step(0)
    for layers in ([True], [5.0], [[5]], 5):
        with pytest.raises(retrace.TraceError, match="step 0: layers: "):
            step.sample(SAMPLES[0].id, layers)
    for ids in ([b"x"], [None], 3, "000000/0/0"):
        with pytest.raises(retrace.TraceError, match="step 0: ids: "):
            list(step.samples(ids))


def test_a_step_has_a_table_of_its_samples(run):
    table = run.step(0).table()
    rewards = dict(zip(*(table[name].to_pylist() for name in ("id", "reward")), strict=True))
    assert rewards == {sample.id: sample.reward for sample in SAMPLES}
    assert not {"samples", "routes"} & set(table.column_names)


def test_samples_of_a_step_without_routes_can_be_read(tmp_path):
    store = retrace.open_store(str(tmp_path))
    retrace.traces.write_step(store, 0, without_routes(SAMPLES), None, None)
    step = retrace.open_run(tmp_path).step(0)
    assert [sample.routes for sample in step.samples()] == [None] * len(SAMPLES)
    with pytest.raises(retrace.TraceError, match="no routes in its samples"):
        step.sample(SAMPLES[0].id, layers=[1])


def test_metrics_are_a_table(run):
    """The table has one row per step, one column per metric, and nulls for unmeasured values."""
    for step, metrics in enumerate([{"b": 1, "a": 0.5}, {"a": None, "c": 2.0}]):
        commit(run.store, keys.metrics(step), {"step": step, "metrics": metrics}, new_write_id())
    assert run.metrics().equals(
        pa.table(
            {
                "step": pa.array([0, 1], pa.int64()),
                "a": pa.array([0.5, None], pa.float64()),
                "b": pa.array([1.0, None], pa.float64()),
                "c": pa.array([None, 2.0], pa.float64()),
            }
        )
    )


def test_a_run_without_a_finished_step_has_no_metrics(run):
    assert run.metrics().column_names == ["step"]
    assert run.metrics().num_rows == 0


def test_policies_are_listed_and_fetched(run, tmp_path):
    for version in (0, 3):
        folder = tmp_path / f"weights{version}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(some_weights(version))
        publish_policy(run.store, version, folder)
    assert run.policies() == [0, 3]
    fetched = run.fetch_policy(np.int64(3), tmp_path / "fetched")  # as from a data frame
    assert (fetched / "model.safetensors").read_bytes() == some_weights(3)
    with pytest.raises(retrace.TraceError, match=r"version 2 is not stored .*: 0, 3$"):
        run.fetch_policy(2, tmp_path / "other")
    for wrong in ("3", 3.0, True, -1):
        with pytest.raises(retrace.TraceError, match="policy version"):
            run.fetch_policy(wrong, tmp_path / "other")
        with pytest.raises(retrace.TraceError, match="step"):
            run.step(wrong)


@pytest.mark.parametrize("place", [None, 5, "a\0b", "\ud800"])
def test_places_that_cannot_exist_are_refused(run, place):
    """The path of a run, of a store of runs, and of the folder for a policy."""
    for use in (retrace.open_run, lambda p: list(retrace.list_runs(p)), retrace.remove_run):
        with pytest.raises(retrace.StoreError, match="store: found"):
            use(place)
    with pytest.raises(
        retrace.TraceError, match=r"folder: found .*; give the folder to write into"
    ):
        run.fetch_policy(0, place)


def test_only_finished_validations_are_listed(run):
    """Only one of two planned validations has all its shards."""
    for version in (0, 2):
        publish_plan(run.store, make_validation_plan(version=version))
    for shard in range(2):
        body = {"version": 0, "shard": shard, "reward_sum": 1.5, "count": 3, "masked": 0}
        body["maker"] = {"sources": {"gsm8k": {"reward": [1.5, 3], "acc": [float(shard), 1]}}}
        commit(run.store, keys.validation(0, shard), body, new_write_id())
    means = {"gsm8k": {"reward": 0.5, "acc": 0.5}}
    [validation] = run.validations()
    assert validation == Validation(0, 6, 0.5, samples_per_prompt=2, sources=means)
    assert validation.metrics() == {
        "val/reward/mean": 0.5,
        "val-core/gsm8k/acc/mean@2": 0.5,
        "val-aux/gsm8k/reward/mean@2": 0.5,
    }


def test_a_run_has_a_description(run):
    assert not run.recorded_set
    mode = run.step(0).manifest.provenance.kind
    assert run.description.settings["actor_rollout_ref"]["actor"]["router_replay"]["mode"] == mode
    assert run.description.geometry == GEOMETRY


def test_a_description_has_what_the_newest_attempt_changed(run):
    before = run.description
    make_attempt(run.store, 0, steps=1)
    assert run.description == before
    make_attempt(run.store, 1, steps=1, changes={"trainer.seed": 7})
    assert run.description.setting("trainer.seed") == 7


def test_a_recorded_set_has_samples_and_its_errors_name_the_missing_parts(recorded):
    assert recorded.recorded_set
    sample = recorded.step(0).sample(SAMPLES[3].id)
    assert equal(sample.routes, SAMPLES[3].routes)
    assert sample.reward == SAMPLES[3].reward
    for what in (lambda: sample.prompt_text, lambda: recorded.text([1])):
        with pytest.raises(retrace.TraceError, match="no tokenizer is stored there"):
            what()
    lacking = {
        "description": lambda: recorded.description,
        "metrics": recorded.metrics,
        "validations": recorded.validations,
        "policies": recorded.policies,
    }
    for what, ask in lacking.items():
        says = f"{recorded.uri}: no {what} there: the store has sealed steps but no run.json"
        with pytest.raises(retrace.TraceError, match=re.escape(says)):
            ask()


def test_a_pruned_step_has_only_its_table(tmp_path):
    store = retrace.open_store(str(tmp_path))
    long_run(store, 3, (1, 2))
    assert [pruned.step for pruned in prune(store, 2)] == [0]
    step = retrace.open_run(tmp_path).step(0)
    assert step.pruned
    assert step.table().num_rows == 6
    assert step.manifest.provenance.kind == "R3"
    with pytest.raises(retrace.TraceError, match=r"step 0 of .*: its samples and routes were remo"):
        next(step.samples())


def test_errors_name_missing_steps_and_runs(run, tmp_path):
    with pytest.raises(retrace.TraceError, match=r"step 4 is not sealed; sealed steps: \[0\]"):
        run.step(4)
    with pytest.raises(retrace.TraceError, match=f"a store of 1 run; .*: {tmp_path}/run"):
        retrace.open_run(tmp_path)
    with pytest.raises(retrace.TraceError, match="no run there; list runs with `retrace runs ls`"):
        retrace.open_run(tmp_path / "nothing")
    with pytest.raises(retrace.StoreError, match="scheme 'ftp' is not known"):
        retrace.open_run("ftp://bucket/run")
