"""The scoring of samples is checked before a run.

A separate process, without credentials, loads the reward file. Without a reward file, the prompts'
data sources are compared with the built-in scorers.
"""

import ast
import os

import pytest

from pipeline.errors import InputError
from pipeline.scoring import trial
from pipeline.scoring.code import unpacked
from tests.unit.inputs.small_inputs import (
    change_of,
    check,
    check_error,
    load,
    prepare,
    the_error,
    use,
    verl_rows,
    write_prompts,
)

NO_FILE = "custom_reward_function.path=null"


PROBLEM = "custom_reward_function.path: "


def test_the_file_runs_in_another_process_without_credentials(settings, monkeypatch):
    """The flow has credentials for the store and for Prefect, which users' code must not reach."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "secret")
    monkeypatch.setenv("REWARD_KEY", "passed")
    path, seen = settings.parent / "reward.py", settings.parent / "seen"
    spy = f"import os\nopen({str(seen)!r}, 'w').write(f'{{os.getpid()}} {{dict(os.environ)}}')\n"
    path.write_text(spy + path.read_text())
    run = prepare(load(settings))
    pid, _, variables = seen.read_text().partition(" ")
    assert int(pid) != os.getpid()
    assert "AWS_" not in variables
    assert "PREFECT_" not in variables
    assert ast.literal_eval(variables)["REWARD_KEY"] == "passed"
    assert run.store.read(run.description.inputs.reward.key) == path.read_bytes()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("import os; os._exit(3)", "its process ended with exit code 3; fix the file"),
        ("import sys; sys.exit('bye')", "running it raised SystemExit: bye (reward.py, line 2)"),
        ("import os; os.environ['AWS_SECRET_ACCESS_KEY']", "set and read REWARD_AWS_SECRET_ACC"),
        ("from .helper import value", "relative import"),
        ("import time; time.sleep(10**6)", "did not return within 3 s (the limit of this check)"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused(settings, monkeypatch, line, text):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    if "sleep" in line:
        monkeypatch.setattr(trial, "LOAD_S", 3.0)
    path = settings.parent / "reward.py"
    path.write_text(f"\n{line}\n{path.read_text()}")
    problem = the_error(settings)
    assert problem.startswith(f"{PROBLEM}{path}: ")
    assert text in problem


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("import not_there.x", "it imports 'not_there', which is not installed"),
        ("import os; os.environ['REWARD_ABSENT_KEY']", "KeyError: 'REWARD_ABSENT_KEY'"),
    ],
)
def test_what_only_the_workers_may_have_is_noted(settings, line, text):
    path = settings.parent / "reward.py"
    path.write_text(f"{line}\n{path.read_text()}")
    [note] = [note for note in check(settings).notes if note.startswith(PROBLEM)]
    assert text in note
    assert "unchecked" in note


def test_what_the_file_prints_goes_to_stderr(settings, capfd):
    path = settings.parent / "reward.py"
    path.write_text(f"print('hello')\n{path.read_text()}")
    assert not [note for note in check(settings).notes if note.startswith(PROBLEM)]
    out, err = capfd.readouterr()
    assert ("hello" in out, "hello" in err) == (False, True)


def test_a_file_that_reads_withheld_variables_is_noted(settings):
    path = settings.parent / "reward.py"
    reads = "import os\nfrom os import environ, getenv\nos.environ['MINE'] = '1'\n"
    reads += "def f(): environ.get('JUDGE_URL', ''), getenv('B_KEY'), os.environ['HOME']\n"
    path.write_text(f"{reads}KEY = os.environ.get('REWARD_KEY')\n{path.read_text()}")
    [note] = [note for note in check(settings).notes if "custom_reward_function" in note]
    assert "the environment variables B_KEY, JUDGE_URL, which" in note
    assert "REWARD_B_KEY" in note


def test_further_arguments_must_be_parameters_of_the_function(settings):
    kwargs = "custom_reward_function.reward_kwargs={scale: 2}"
    assert "scale=; use these names" in the_error(settings, kwargs)
    path = settings.parent / "reward.py"
    path.write_text(path.read_text().replace("extra_info=None", "extra_info=None, scale=1"))
    run = prepare(load(settings, kwargs))
    assert run.description.setting("custom_reward_function.reward_kwargs") == {"scale": 2}
    again = prepare(load(settings, "custom_reward_function.reward_kwargs.scale=3"))
    assert "reward_kwargs: was {'scale': 2}, now {'scale': 3}" in change_of(again)
    use(again.store)
    with pytest.raises(InputError, match="reward_kwargs: was"):
        prepare(load(settings, kwargs))


@pytest.mark.parametrize("source", ["def compute_score(a): 1", "\xff\n".encode("latin-1"), ""])
def test_a_file_with_a_definite_mistake_is_refused(settings, source):
    path = settings.parent / "reward.py"
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    assert the_error(settings).startswith(f"custom_reward_function.path: {path}: ")


def with_sources(*sources):
    return [
        row | {"data_source": source} for row, source in zip(verl_rows(10), sources, strict=True)
    ]


def test_without_a_file_the_built_in_scorers_are_used(settings):
    sources = ["openai/gsm8k", "lighteval/MATH", "aime2024", "math_dapo", "numina_cn_k12"] * 2
    write_prompts(settings.parent / "train.parquet", with_sources(*sources))
    inputs = check(settings, NO_FILE)
    assert inputs.reward is None
    run = prepare(load(settings, NO_FILE))
    assert run.description.inputs.reward is None
    assert prepare(load(settings, NO_FILE)).description == run.description


def test_data_sources_without_a_scorer_are_named_for_each_file(settings):
    train, val = settings.parent / "train.parquet", settings.parent / "val.parquet"
    write_prompts(train, with_sources(*["openai/gsm8k"] * 7, "codecontests", "taco", "taco"))
    write_prompts(val, verl_rows(2))
    files = f"data.val_files={val}"
    problems = check_error(settings, NO_FILE, files)
    assert [problem.split(" has prompts with ")[0] for problem in problems] == [
        f"data.train_files: {train}",
        f"data.val_files: {val}",
    ]
    assert "data_source 'codecontests' (1), 'taco' (2)" in problems[0]
    assert check(settings, files).reward is not None, "a reward file scores them all"


def test_a_neighbour_is_part_of_the_reward_input(settings):
    """The staged archive contains the file and the neighbour, whose changes count."""
    folder = settings.parent
    (folder / "helper.py").write_text("RIGHT = 1.0")
    reward = folder / "reward.py"
    reward.write_text("from helper import RIGHT\n" + reward.read_text())
    run = prepare(load(settings))
    key = run.description.inputs.reward.key
    assert key.endswith("/reward.zip")
    with unpacked(run.store.read(key)) as path:
        assert path.read_bytes() == reward.read_bytes()
        assert sorted(file.name for file in path.parent.iterdir()) == ["helper.py", "reward.py"]
    [note] = [note for note in check(settings).notes if "custom_reward_function" in note]
    assert note.endswith("uses from its folder: helper.py")
    (folder / "unused.py").write_text("changed")
    assert change_of(prepare(load(settings))) is None
    (folder / "helper.py").write_text("RIGHT = 2.0")
    assert change_of(prepare(load(settings))).startswith("the reward function (")
