"""verl's 47 scripts for Megatron: every setting reaches a verdict, and the tables tell it."""

import pytest

from pipeline.config.reading.load import load_config
from pipeline.config.reading.read import read_override
from pipeline.config.reading.verl import find_foreign
from pipeline.errors import InputError
from tests.verl_jobs import algorithms, examples, needs_verl
from tests.verl_verdicts import (
    OWN,
    PAGE,
    key_of,
    render,
    settings_of,
    stored_verdicts,
    verdicts,
)

COMMAND = "python -m tests.verl_verdicts"
NUMBERS = (148, 4334)
"""Scripts, and settings in them; a key that a script sets twice counts once."""
REFUSED = sorted(
    {
        (setting, text)
        for verdict in stored_verdicts().values()
        for setting, text in verdict["refused"].items()
        if (entry := find_foreign(key_of(setting))) is None or entry.agreement is None
    }
)
"""Those that are refused by themselves, not for what others say."""


@needs_verl
def test_the_scripts_are_there():
    settings = [settings_of(one) for one in (*examples().values(), *algorithms().values())]
    keys = [{key_of(setting) for setting in of_script} for of_script in settings]
    assert (len(keys), sum(map(len, keys))) == NUMBERS


@needs_verl
def test_every_argument_is_a_setting():
    for script, arguments in examples().items():
        for setting in settings_of(arguments):
            try:
                read_override(setting)
            except Exception as error:
                error.add_note(script)
                raise


@needs_verl
def test_verdicts_are_those_on_record():
    """A verdict that changes is a decision: `python -m tests.verl_verdicts` writes the new ones."""
    assert verdicts() == stored_verdicts(), f"run `{COMMAND}` and look at the difference"


def test_each_script_and_setting_is_on_record():
    found = stored_verdicts().values()
    counted = [v["accepted"] + v["ignored"] + len(v["refused"]) for v in found]
    assert (len(counted), sum(counted)) == NUMBERS


@pytest.mark.parametrize(("setting", "message"), REFUSED)
def test_what_is_refused_on_record_is_refused(setting: str, message: str):
    """A feature that is built since takes its refusals off the record."""
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    others = [] if "use_dynamic_bsz" in setting else [f"{micro}=1"]
    with pytest.raises(InputError) as caught:
        load_config({}, [setting, *others, *OWN, "trainer.experiment_name=x"])
    assert [problem for problem in caught.value.problems if key_of(setting) in problem] == [
        f"{key_of(setting)}: {message}"
    ]


def test_the_page_shows_them():
    page = PAGE.read_text()
    for part in ("imported", "other defaults", "verdicts"):
        assert f"<!-- {part}: " in page
        assert f"<!-- end of {part} -->" in page
    assert render(page) == page, f"run `{COMMAND}`"
