"""`retrace.check` and `retrace.run`: what they take, what they return, what they refuse."""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

import retrace
from pipeline.cli.check import run_check
from pipeline.inputs.stage import stage
from pipeline.run import keys
from pipeline.run.commit import commit
from retrace import starting
from tests.attempts import make_attempt
from tests.samples import make_samples, write_run
from tests.tiny_models import make_tiny
from tests.unit.inputs.small_inputs import write_inputs


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return write_inputs(folder, make_tiny(folder / "model", "qwen3_moe"))


@pytest.mark.parametrize("form", ["path", "text", "mapping"])
def test_right_input(settings, form):
    content = yaml.safe_load(settings.read_text())
    config = {"path": settings, "text": str(settings), "mapping": content}[form]
    ready = retrace.check(config, {"trainer.default_hdfs_dir": "x"}, trainer={"seed": 3})
    assert ready.uri == f"file://{settings.parent}/store/test"
    assert (ready.prompts, ready.val_prompts) == (10, 0)
    assert ready.geometry == retrace.Geometry(16, 4, (0, 1, 2, 3))
    assert ready.notes == ("trainer.default_hdfs_dir: ignored; the run's state lies in store.uri",)
    assert ready.settings["trainer"]["seed"] == 3
    assert ready.settings["trainer"]["total_training_steps"] == 2, "merged, not replaced"
    assert not (settings.parent / "store").exists()
    assert content == yaml.safe_load(settings.read_text()), "left as it was"


@pytest.mark.parametrize(
    "overrides",
    [
        {"trainer.seed": 7, "data.train_files": ["train.parquet"]},
        {"trainer": {"seed": 7}, "data.train_files": ("train.parquet",)},
        {"trainer.seed": 7, "data.train_files": Path("train.parquet")},
        ["trainer.seed=7", "data.train_files=train.parquet"],
        "trainer.seed=7",
    ],
)
def test_forms_of_overrides(settings, overrides, monkeypatch):
    monkeypatch.chdir(settings.parent)  # paths are relative to it
    assert retrace.check(settings, overrides).settings["trainer"]["seed"] == 7


def test_groups_come_last(settings):
    ready = retrace.check(settings, {"trainer.seed": 7}, trainer={"seed": 8})
    assert ready.settings["trainer"]["seed"] == 8


NOT_CHECKED = "what depends on wrong settings was not checked: correct them first"


@pytest.mark.parametrize(
    ("arguments", "groups", "says"),
    [
        (({"trainer.nnode": 2},), {}, "trainer.nnode: unknown key; did you mean trainer.nnodes?"),
        (({"trainer..seed": 2},), {}, "'trainer..seed': expected the dotted key of a setting"),
        (({3: 2},), {}, "3: expected the dotted key of a setting, such as trainer.seed"),
        (({"trainer": {3: 2}},), {}, "settings: found the key 3, expected the name of a setting"),
        ((), {"trainr": {"seed": 2}}, "trainr: unknown key; did you mean trainer?"),
        ((), {"trainer": {"seed": "2"}}, "trainer.seed: found '2' (text), expected an integer"),
    ],
)
def test_what_is_no_setting_is_refused(settings, arguments, groups, says):
    with pytest.raises(retrace.InputError) as caught:
        retrace.check(settings, *arguments, **groups)
    (problem,) = caught.value.problems
    assert problem.startswith(says)
    assert caught.value.__notes__ == [NOT_CHECKED]


def test_wrong_settings_hide_nothing_else(settings):
    """Settings, model, prompts and reward file at once, but nothing that follows from a value that
    was not given: of the batch size, whose default has 32 prompts, there is one line."""
    with pytest.raises(retrace.InputError) as caught:
        retrace.check(
            settings,
            {
                "trainer.seed": "x",
                "trainer.nnode": 2,
                "data.train_batch_size": 0,
                "data.val_files": "no.parquet",
                "actor_rollout_ref.model.path": "no/model/here",
                "custom_reward_function.name": "other",
                "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size": 2,
            },
        )
    assert sorted(problem.split(":")[0] for problem in caught.value.problems) == [
        "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size",
        "actor_rollout_ref.model.path",
        "custom_reward_function.path",
        "data.train_batch_size",
        "data.val_files",
        "trainer.nnode",
        "trainer.seed",
    ]
    assert caught.value.__notes__ == [NOT_CHECKED]


def test_missing_settings_hide_nothing_else(settings):
    text = "data: {train_files: no.parquet}\ntrainer: {total_training_steps: 2}\n"
    (settings.parent / "short.yaml").write_text(text)
    with pytest.raises(retrace.InputError) as caught:
        retrace.check(settings.parent / "short.yaml")
    assert sorted(problem.split(":")[0] for problem in caught.value.problems) == [
        "actor_rollout_ref.model.path",
        "data.train_files",
        "trainer.experiment_name",
    ]


def test_a_model_without_weights_is_checked_too(settings):
    """Its config and its tokenizer."""
    model = settings.parent / "light"
    shutil.copytree(settings.parent / "model", model)
    (model / "model.safetensors").unlink()
    with pytest.raises(retrace.InputError) as caught:
        retrace.check(
            settings, {"actor_rollout_ref.model.path": model, "data.max_response_length": 10**6}
        )
    assert sorted(problem.split(":")[0] for problem in caught.value.problems) == [
        "actor_rollout_ref.model.path",
        "data.max_response_length",
    ]


def test_all_problems_with_what_else_is_to_be_known(settings):
    with pytest.raises(retrace.InputError) as caught:
        retrace.check(
            settings,
            ["trainer.default_hdfs_dir=x"],
            data={"train_files": "a.parquet"},
            launch={"rollout_workers": 0},
        )
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "launch.rollout_workers",
        "data.train_files",
    ]
    assert caught.value.notes == (
        "trainer.default_hdfs_dir: ignored; the run's state lies in store.uri",
    )


@pytest.fixture
def flow(settings, tmp_path, monkeypatch):
    """In place of the flow: it leaves a run's description, and the inputs that it was given."""
    given = []

    def run_flow(inputs, display, server):
        store = retrace.open_store(str(tmp_path / "run"))
        write_run(store, make_samples(), "R3")
        given.append(inputs)
        return store.uri

    monkeypatch.setattr("pipeline.flows.local.run_flow", run_flow)
    monkeypatch.setattr("pipeline.flows.server.prefect_server", nullcontext)
    monkeypatch.setattr("pipeline.report.outcome.report", lambda config, store: None)
    for name in starting._PREFECT:
        monkeypatch.setenv(name, "the user's")
    return given


def test_a_run_is_checked_run_and_opened(settings, flow):
    run = retrace.run(settings, {"trainer.total_training_steps": 1})
    assert run.description.setting("actor_rollout_ref.actor.router_replay.mode") == "R3"
    assert [inputs.config.trainer.total_training_steps for inputs in flow] == [1]
    assert {os.environ[name] for name in starting._PREFECT} == {"the user's"}


def test_nothing_runs_with_wrong_input(settings, flow):
    with pytest.raises(retrace.InputError):
        retrace.run(settings, {"trainer.total_training_steps": 0})
    assert flow == []


def finish(settings: Path, overrides: dict[str, str]) -> retrace.Store:
    """The run of the settings as its only start left it: two steps, finished."""
    run = stage(retrace.check(settings, overrides)._inputs)
    make_attempt(run.store, 0, steps=2)
    for step in range(2):
        body = {"metrics": {"critic/rewards/mean": 0.5 + step}}
        commit(run.store, keys.metrics(step), body, retrace.new_write_id())
    return run.store


def test_a_finished_run_is_opened_without_a_flow(settings, flow, tmp_path, capsys):
    """And nothing is written. With more steps it goes on."""
    overrides = {"store.uri": str(tmp_path / "store")}
    store = finish(settings, overrides)
    before = [info.key for info in store.list("")]
    run = retrace.run(settings, overrides)
    assert (run.uri, run.metrics()["step"].to_pylist()) == (store.uri, [0, 1])
    assert "finished, nothing is left to do" in capsys.readouterr().err
    assert [info.key for info in store.list("")] == before
    assert flow == []
    retrace.run(settings, {**overrides, "trainer.total_training_steps": 3})
    assert len(flow) == 1


def test_that_a_run_is_finished_is_said_before_its_inputs_are_checked(
    settings, tmp_path, capsys, monkeypatch
):
    place = f"store.uri={tmp_path}/store"
    store = finish(settings, {"store.uri": f"{tmp_path}/store"})

    def check(*_: object) -> None:
        said = capsys.readouterr().err.splitlines()
        assert said == [f"checking {settings}", f"{store.uri}: all 2 steps are finished already"]
        raise retrace.InputError(["stop here"])

    monkeypatch.setattr(retrace, "check", check)
    assert run_check(settings, [place]) == 2
    assert capsys.readouterr().err == "error: stop here\n"
