"""The scoring of samples is checked without running users' code.

The check reads the text of the reward file. Without a reward file, it compares the prompts' data
sources with the built-in scorers.
"""

import pytest

from pipeline.errors import InputError
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


def test_checking_and_staging_do_not_run_the_file(settings):
    """The flow has credentials for the store and for Prefect, which users' code must not reach."""
    path, marker = settings.parent / "reward.py", settings.parent / "ran"
    path.write_text(f"open({str(marker)!r}, 'w')\nraise SystemExit\n{path.read_text()}")
    run = prepare(load(settings))
    assert not marker.exists()
    assert run.store.read(run.description.inputs.reward.key) == path.read_bytes()


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
