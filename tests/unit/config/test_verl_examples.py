"""Every setting in verl's example scripts has a stored verdict, which docs/from-verl.md shows."""

import pytest

from pipeline.config.reading.load import load_config
from pipeline.config.reading.read import read_override
from pipeline.config.reading.verl import find_foreign
from pipeline.errors import InputError
from tests.paths import ROOT
from tests.verl_jobs import algorithms, examples
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
"""The number of scripts, and of settings in them; a key that a script sets twice counts only
once."""
REFUSED = sorted(
    {
        (setting, text)
        for verdict in stored_verdicts().values()
        for setting, text in verdict["refused"].items()
        if (entry := find_foreign(key_of(setting))) is None or entry.agreement is None
    }
)
"""Settings that are refused regardless of the values of other settings."""


def test_all_scripts_were_copied():
    settings = [settings_of(one) for one in (*examples().values(), *algorithms().values())]
    keys = [{key_of(setting) for setting in of_script} for of_script in settings]
    assert (len(keys), sum(map(len, keys))) == NUMBERS


def test_every_argument_is_a_setting():
    for script, arguments in examples().items():
        for setting in settings_of(arguments):
            try:
                read_override(setting)
            except Exception as error:
                error.add_note(script)
                raise


def test_verdicts_match_the_record():
    """Changing a verdict is a decision; `python -m tests.verl_verdicts` records the new verdict."""
    assert verdicts() == stored_verdicts(), f"run `{COMMAND}` and look at the difference"


def test_each_script_and_setting_is_on_record():
    found = stored_verdicts().values()
    counted = [v["accepted"] + v["ignored"] + len(v["refused"]) for v in found]
    assert (len(counted), sum(counted)) == NUMBERS


@pytest.mark.parametrize(("setting", "message"), REFUSED)
def test_refusals_on_record_still_apply(setting: str, message: str):
    """When a feature is implemented, its refusals must be removed from the record."""
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    others = [] if "use_dynamic_bsz" in setting else [f"{micro}=1"]
    with pytest.raises(InputError) as caught:
        load_config({}, [setting, *others, *OWN, "trainer.experiment_name=x"])
    assert [problem for problem in caught.value.problems if key_of(setting) in problem] == [
        f"{key_of(setting)}: {message}"
    ]


def test_the_settings_page_shows_the_totals():
    found = stored_verdicts().values()
    outcomes = [sum(v["accepted"] for v in found), sum(v["ignored"] for v in found)]
    outcomes.append(sum(len(v["refused"]) for v in found))
    accepted, ignored, refused = (f"{number:,}" for number in outcomes)
    page = " ".join((ROOT / "docs/config.md").read_text().split())
    assert (
        f"Of the {sum(outcomes):,} settings in {len(found)} of verl's scripts, Retrace accepts "
        f"{accepted}, ignores {ignored} and refuses {refused} ([from-verl.md](from-verl.md#verls-"
    ) in page, "correct the numbers in pipeline/config/docs.py"


def test_the_page_shows_the_verdicts():
    page = PAGE.read_text()
    for part in ("imported", "other defaults", "verdicts"):
        assert f"<!-- {part}: " in page
        assert f"<!-- end of {part} -->" in page
    assert render(page) == page, f"run `{COMMAND}`"
