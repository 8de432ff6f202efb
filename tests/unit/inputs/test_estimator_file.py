"""A user's estimator is loaded in its own process. The content of its file is staged; the path does
not matter.

The estimator may be amended until a step is trained with it.
"""

import pytest

from pipeline.policies.versions import publish_policy
from pipeline.run import keys
from tests.unit.inputs.small_inputs import change_of, check, load, prepare, the_error, use

KEY = "algorithm.adv_estimator"
SOURCE = """
def mine(rollouts, settings):
    return None
"""


@pytest.fixture
def file(settings):
    path = settings.parent / "advantages.py"
    path.write_text(SOURCE)
    return path


def test_it_is_staged_and_loaded_from_the_store(settings, file):
    run = prepare(load(settings, f"{KEY}={file}:mine"))
    staged = run.description.inputs.functions[KEY]
    assert run.store.read(staged.key) == file.read_bytes()
    assert staged in run.description.inputs.files()
    moved = file.rename(file.with_name("moved.py"))
    again = prepare(load(settings, f"{KEY}={moved}:mine"))
    assert (change_of(again), again.description) == (None, run.description)


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (SOURCE, "other", "found functions mine, expected one named other"),
        ("def mine(settings, rollouts): 1", "mine", "parameters (settings, rollouts)"),
        ("async def mine(a, b): 1", "mine", "mine is async"),
        ("from .helper import mine", "mine", "relative import"),
        ("1 / 0", "mine", "running it raised ZeroDivisionError"),
    ],
)
def test_definite_mistakes_are_refused(settings, file, source, name, message):
    file.write_text(source)
    problem = the_error(settings, f"{KEY}={file}:{name}")
    assert problem.startswith(f"{KEY}: {file}: ")
    assert message in problem


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("import not_there", "it imports 'not_there', which is not installed"),
        ("import os; os.environ['RANK_OF_WORKERS']", "KeyError: 'RANK_OF_WORKERS'"),
    ],
)
def test_what_only_training_ranks_may_have_is_noted(settings, file, line, text):
    file.write_text(line + SOURCE)
    [note] = [note for note in check(settings, f"{KEY}={file}:mine").notes if KEY in note]
    assert note.startswith(f"{KEY}: {file}: ")
    assert text in note
    assert "training ranks" in note


def test_a_fixed_file_amends_the_run(settings, file, model):
    """If the function raised an exception in the first step, the user may fix the file although
    samples exist. Once a policy has been trained with the file, a different one requires a new
    run."""
    store = prepare(load(settings, f"{KEY}={file}:mine")).store
    use(store)
    file.write_text(SOURCE + "# fixed\n")
    run = prepare(load(settings, f"{KEY}={file}:mine"))
    assert change_of(run).startswith("an estimator or loss")
    assert run.store.read(run.description.inputs.functions[KEY].key) == file.read_bytes()

    publish_policy(store, 1, model)
    file.write_text(SOURCE)
    problem = the_error(settings, f"{KEY}={file}:mine")
    assert f"  {KEY}: was SHA-256 " in problem
    assert f", but {keys.policy(1)} depends on the earlier one" in problem
    assert change_of(run).startswith("an estimator or loss")
