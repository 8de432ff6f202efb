"""A user's estimator is checked without running it. The content of its file is staged; the path
does not matter.

The estimator may be amended until a step is trained with it.
"""

import pytest

from pipeline.inputs.stage import prepare
from pipeline.policies.versions import publish_policy
from pipeline.run import keys
from tests.unit.inputs.small_inputs import check, load, the_error, use

KEY = "algorithm.adv_estimator"
SOURCE = """
raise SystemExit("only training ranks run it")


def mine(rollouts, settings):
    return None
"""


@pytest.fixture
def file(settings):
    path = settings.parent / "advantages.py"
    path.write_text(SOURCE)
    return path


def test_it_is_staged_and_loaded_from_the_store(settings, file):
    """The flow does not run the file. A different path with the same content does not change the
    run."""
    run = prepare(load(settings, f"{KEY}={file}:mine"))
    staged = run.description.inputs.functions[KEY]
    assert run.store.read(staged.key) == file.read_bytes()
    assert staged in run.description.inputs.files()
    moved = file.rename(file.with_name("moved.py"))
    again = prepare(load(settings, f"{KEY}={moved}:mine"))
    assert (again.amended, again.description) == (None, run.description)


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (SOURCE, "other", "found functions mine, expected one named other; rename it, or change "
         "algorithm.adv_estimator"),
        ("def mine(rewards): 1", "mine", "mine has the parameters (rewards), but is called as "
         "mine(rollouts, settings); declare these 2, in this order"),
        ("def mine(settings, rollouts): 1", "mine", "mine has the parameters (settings, rollouts), "
         "but is called as mine(rollouts, settings); declare these 2, in this order"),
        ("def mine(a, b, c): 1", "mine", "mine has the parameters (a, b, c), but is called as"),
        ("async def mine(a, b): 1", "mine", "mine is async; expected a plain function mine(roll"),
        ("1 +", "mine", "syntax error"),
    ],
)  # fmt: skip
def test_definite_mistakes_are_refused(settings, file, source, name, message):
    file.write_text(source)
    problem = the_error(settings, f"{KEY}={file}:{name}")
    assert problem.startswith(f"{KEY}: {file}: ")
    assert message in problem


def test_a_missing_file_is_refused_and_possible_problems_are_noted(settings, file):
    assert the_error(settings, f"{KEY}=no.py:f").startswith(f"{KEY}: no file no.py (from ")
    file.write_text("from not_there import mine")
    found = [note for note in check(settings, f"{KEY}={file}:mine").notes if KEY in note]
    assert "is unknown until the training ranks run the file: it is imported" in found[0]
    assert "but the training ranks need it; put the code into the file" in found[1]


def test_a_fixed_file_amends_the_run(settings, file, model):
    """If the function raised an exception in the first step, the user may fix the file although
    samples exist. Once a policy has been trained with the file, a different one requires a new
    run."""
    store = prepare(load(settings, f"{KEY}={file}:mine")).store
    use(store)
    file.write_text(SOURCE + "# fixed\n")
    run = prepare(load(settings, f"{KEY}={file}:mine"))
    assert run.amended.startswith(f"an estimator or loss ({KEY}: was SHA-256 ")
    assert run.amended.endswith("because no step has been trained with it yet")
    assert run.store.read(run.description.inputs.functions[KEY].key) == file.read_bytes()

    publish_policy(store, 1, model)
    file.write_text(SOURCE)
    problem = the_error(settings, f"{KEY}={file}:mine")
    assert f"  {KEY}: was SHA-256 " in problem
    assert f", but {keys.policy(1)} depends on the earlier one" in problem
    assert "trainer.experiment_name=test-2" in problem
