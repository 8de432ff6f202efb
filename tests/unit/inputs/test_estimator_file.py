"""An estimator of the user's is checked by its text, staged by content, and amended until a step
was trained with it."""

import pytest

from pipeline.inputs.stage import prepare
from pipeline.run import keys
from pipeline.run.policy import publish_policy
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
    """Nothing of it runs in the flow. Another file with the same content is the same run."""
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
         "mine(rollouts, settings); take these 2"),
        ("def mine(a, b, c): 1", "mine", "mine has the parameters (a, b, c), but is called as"),
        ("async def mine(a, b): 1", "mine", "mine is async; expected a plain function mine(roll"),
        ("1 +", "mine", "syntax error"),
    ],
)  # fmt: skip
def test_what_is_certainly_wrong_is_refused(settings, file, source, name, message):
    file.write_text(source)
    problem = the_error(settings, f"{KEY}={file}:{name}")
    assert problem.startswith(f"{KEY}: {file}: ")
    assert message in problem


def test_no_file_and_notes(settings, file):
    assert the_error(settings, f"{KEY}=no.py:f").startswith(f"{KEY}: no file no.py (from ")
    file.write_text("from not_there import mine")
    found = [note for note in check(settings, f"{KEY}={file}:mine").notes if KEY in note]
    assert "is not known before the training ranks run the file: it is imported" in found[0]
    assert "the training ranks need it (the folder of the estimator file is not" in found[1]


def test_a_mended_file(settings, file, model):
    """Its function raised in the first step, whose samples are there: it may be mended. After a
    policy was trained with it, only a new run takes another."""
    store = prepare(load(settings, f"{KEY}={file}:mine")).store
    use(store)
    file.write_text(SOURCE + "# mended\n")
    run = prepare(load(settings, f"{KEY}={file}:mine"))
    assert run.amended.startswith(f"an estimator or loss ({KEY}: it has SHA-256 ")
    assert run.amended.endswith("as no step was trained with it yet")
    assert run.store.read(run.description.inputs.functions[KEY].key) == file.read_bytes()

    publish_policy(store, 1, model)
    file.write_text(SOURCE)
    problem = the_error(settings, f"{KEY}={file}:mine")
    assert f"  {KEY}: it has SHA-256 " in problem
    assert f", but {keys.policy(1)} was made with the earlier one" in problem
    assert "trainer.experiment_name=test-2" in problem
