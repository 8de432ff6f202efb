"""verl's 28 Megatron example scripts: every setting reaches a verdict, and the tables tell it."""

import json

from pipeline.config.reading.read import read_override
from tests.verl_jobs import FOLDER, examples
from tests.verl_verdicts import PAGE, render, settings_of, verdicts

COMMAND = "python -m tests.verl_verdicts"


def test_the_scripts_are_there():
    assert len(examples()) == 28
    assert sum(len(settings_of(arguments)) for arguments in examples().values()) == 1920


def test_every_argument_is_a_setting():
    for script, arguments in examples().items():
        for setting in settings_of(arguments):
            try:
                read_override(setting)
            except Exception as error:
                error.add_note(script)
                raise


def test_verdicts_are_those_on_record():
    """A verdict that changes is a decision: `python -m tests.verl_verdicts` writes the new ones."""
    stored = json.loads((FOLDER / "verdicts.json").read_text())
    assert verdicts() == stored, f"run `{COMMAND}` and look at the difference"


def test_the_page_shows_them():
    page = PAGE.read_text()
    for part in ("imported", "other defaults", "verdicts"):
        assert f"<!-- {part}: " in page
        assert f"<!-- end of {part} -->" in page
    assert render(page) == page, f"run `{COMMAND}`"
