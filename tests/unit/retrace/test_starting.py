"""`retrace.check` and `retrace.run`: arguments, results and errors."""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

import retrace
from pipeline.cli.check import checked
from pipeline.inputs.stage import stage
from pipeline.run import keys
from pipeline.run.attempts import end_attempt, take_attempt
from pipeline.run.commit import commit
from retrace import starting
from tests.attempts import living_owner, make_attempt
from tests.samples import make_samples, write_run
from tests.tiny_models import make_tiny
from tests.unit.inputs.small_inputs import write_inputs


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return write_inputs(folder, make_tiny(folder / "model", "qwen3_moe"))


@pytest.mark.parametrize("form", ["path", "text", "mapping"])
def test_correct_input_is_accepted(settings, form):
    content = yaml.safe_load(settings.read_text())
    config = {"path": settings, "text": str(settings), "mapping": content}[form]
    ready = retrace.check(config, {"trainer.default_hdfs_dir": "x"}, trainer={"seed": 3})
    assert ready.uri == f"file://{settings.parent}/store/test"
    assert (ready.prompts, ready.val_prompts) == (10, 0)
    assert ready.geometry == retrace.traces.Geometry(16, 4, (0, 1, 2, 3))
    assert ready.notes == ("trainer.default_hdfs_dir: not taken over; Retrace has no such setting",)
    assert ready.settings["trainer"]["seed"] == 3
    assert ready.settings["trainer"]["total_training_steps"] == 2, "merged, not replaced"
    assert not (settings.parent / "store").exists()
    assert content == yaml.safe_load(settings.read_text()), "the mapping is unchanged"


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
def test_overrides_may_have_several_forms(settings, overrides, monkeypatch):
    monkeypatch.chdir(settings.parent)  # relative paths start from there
    assert retrace.check(settings, overrides).settings["trainer"]["seed"] == 7


def test_groups_replace_overrides(settings):
    ready = retrace.check(settings, {"trainer.seed": 7}, trainer={"seed": 8})
    assert ready.settings["trainer"]["seed"] == 8


NOT_CHECKED = "checks that depend on invalid settings were skipped: correct these first"


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
def test_keys_that_are_not_settings_are_refused(settings, arguments, groups, says):
    with pytest.raises(retrace.InputError) as caught:
        retrace.check(settings, *arguments, **groups)
    (problem,) = caught.value.problems
    assert problem.startswith(says)
    assert caught.value.__notes__ == [NOT_CHECKED]


def test_invalid_settings_hide_no_other_problem(settings):
    """The error reports all problems with the settings, model, prompts and reward file together.

    If a default replaces an invalid value, problems that only the default causes are not reported.
    For example, only one problem with the batch size is reported, although its default of 32
    exceeds the number of prompts.
    """
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


def test_missing_settings_hide_no_other_problem(settings):
    text = "data: {train_files: no.parquet}\ntrainer: {total_training_steps: 2}\n"
    (settings.parent / "short.yaml").write_text(text)
    with pytest.raises(retrace.InputError) as caught:
        retrace.check(settings.parent / "short.yaml")
    assert sorted(problem.split(":")[0] for problem in caught.value.problems) == [
        "actor_rollout_ref.model.path",
        "data.train_files",
        "trainer.experiment_name",
    ]


def test_a_model_without_weights_is_also_checked(settings):
    """The check uses the model's config and tokenizer."""
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


def test_the_error_contains_all_problems_and_notes(settings):
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
        "trainer.default_hdfs_dir: not taken over; Retrace has no such setting",
    )


@pytest.fixture
def flow(settings, tmp_path, monkeypatch):
    """A fake flow that writes a run description and records its inputs in the returned list."""
    given = []

    def run_flow(inputs, claim, display, server):
        store = retrace.open_store(str(tmp_path / "run"))
        write_run(store, make_samples(), "R3")
        given.append(inputs)
        return store.uri

    monkeypatch.setattr("pipeline.flows.local.run_flow", run_flow)
    monkeypatch.setattr("pipeline.flows.server.prefect_server", lambda folder, show: nullcontext())
    monkeypatch.setattr("pipeline.report.outcome.report", lambda config, store: None)
    for name in starting._PREFECT:
        monkeypatch.setenv(name, "the user's")
    return given


def test_a_run_is_checked_started_and_opened(settings, flow):
    run = retrace.run(settings, {"trainer.total_training_steps": 1})
    assert run.description.setting("actor_rollout_ref.actor.router_replay.mode") == "R3"
    assert [inputs.config.trainer.total_training_steps for inputs in flow] == [1]
    assert {os.environ[name] for name in starting._PREFECT} == {"the user's"}


def test_invalid_input_starts_no_flow(settings, flow):
    with pytest.raises(retrace.InputError):
        retrace.run(settings, {"trainer.total_training_steps": 0})
    assert flow == []


def test_a_second_start_writes_nothing(settings, flow, tmp_path):
    """It starts no server either, whose log would replace that of the first start."""
    overrides = {
        "store.uri": str(tmp_path / "store"),
        "trainer.default_local_dir": str(tmp_path / "local"),
    }
    ready = retrace.check(settings, overrides)
    store = ready._inputs.store
    first = take_attempt(store, ready._inputs.config, living_owner()).attempt
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(retrace.InputError, match=r"is already running since .* in process"):
        ready.run()
    assert flow == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    end_attempt(store, first, "failed", "no expert left")
    ready.run()
    assert flow == [ready._inputs]
    assert store.size(keys.attempt(1)) is not None


def finish(settings: Path, overrides: dict[str, str]) -> retrace.Store:
    """Store a finished run with these settings, one attempt and two steps, and return its store."""
    run = stage(retrace.check(settings, overrides)._inputs)
    make_attempt(run.store, 0, steps=2)
    for step in range(2):
        body = {"step": step, "metrics": {"critic/rewards/mean": 0.5 + step}}
        commit(run.store, keys.metrics(step), body, retrace.traces.new_write_id())
    return run.store


def test_a_finished_run_is_opened_without_a_flow(settings, flow, tmp_path, capsys):
    """Opening a finished run writes nothing.

    If the number of steps is raised, the run continues.
    """
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


def test_the_command_reports_a_finished_run_before_it_checks_inputs(
    settings, tmp_path, capsys, monkeypatch
):
    place = f"store.uri={tmp_path}/store"
    store = finish(settings, {"store.uri": f"{tmp_path}/store"})

    def check(*_: object) -> None:
        said = capsys.readouterr().err.splitlines()
        assert said == [f"checking {settings}", f"{store.uri}: all 2 steps are already finished"]
        raise retrace.InputError(["stop here"])

    monkeypatch.setattr(retrace, "check", check)
    assert checked(settings, [place]) is None
    assert capsys.readouterr().err == "error: stop here\n"


CYCLE: dict = {}
CYCLE["trainer"] = {"again": [CYCLE]}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "settings: found a value of type NoneType, expected a str or a Path; give a YAML"),
        ([1], "settings: found a value of type list, expected a str or a Path; give a YAML"),
        (5, "settings: found a value of type int, expected a str or a Path; give a YAML"),
        ("a\0b.yaml", "settings: found 'a\\x00b.yaml', expected text without U+0000"),
        (CYCLE, "settings: nested more than 64 deep, or part of itself; write each value out"),
    ],
)
def test_settings_of_other_types_are_refused(config, says):
    for use in (retrace.check, retrace.run):
        with pytest.raises(retrace.InputError) as refused:
            use(config)
        (problem,) = refused.value.problems
        assert problem.startswith(says)


def test_an_override_that_contains_itself_is_refused(settings):
    with pytest.raises(retrace.InputError, match="nested more than 64 deep, or part of itself"):
        retrace.check(settings, {"trainer": CYCLE})
