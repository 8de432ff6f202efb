"""The settings in run.json."""

import pytest

from pipeline.config.reading.load import load_config
from pipeline.config.stored import read_stored
from pipeline.errors import InputError
from tests.paths import ROOT

QUICKSTART = load_config(ROOT / "examples/quickstart.yaml").config


def test_stored_settings_are_read_unchanged():
    assert read_stored(QUICKSTART.model_dump(mode="json"), "run.json") == QUICKSTART


def test_all_problems_are_reported_together():
    settings = QUICKSTART.model_dump(mode="json")
    settings |= {"gone": 1, "reward": {"on_error": "ignore"}}
    del settings["actor_rollout_ref"]["model"]["path"]
    with pytest.raises(InputError) as caught:
        read_stored(settings, "run.json")
    assert {problem.split(": ")[1] for problem in caught.value.problems} == {
        "actor_rollout_ref.model.path",
        "reward.on_error",
        "gone",
    }
