"""The reward function is tried when the inputs are staged."""

import pytest

from pipeline.errors import InputError
from pipeline.inputs.stage import try_staged_reward
from tests.unit.inputs.small_inputs import check, load, prepare, use


def test_the_staged_reward_is_tried_until_it_has_scored_samples(settings):
    """The trial writes nothing. A run that has scored samples continues without a trial."""
    assert try_staged_reward(check(settings)) is None
    run = prepare(load(settings))
    path = settings.parent / "reward.py"
    path.write_text("def compute_score(**sample): return sample['extra_info']['absent']")
    before = sorted(info.key for info in run.store.list(""))
    with pytest.raises(InputError, match=r"custom_reward_function\.path: .* KeyError: 'absent'"):
        try_staged_reward(check(settings))
    assert sorted(info.key for info in run.store.list("")) == before
    amended = prepare(load(settings))
    use(amended.store)
    assert try_staged_reward(check(settings)) is None


def test_further_arguments_and_the_environment_apply_to_the_trial(settings, monkeypatch):
    monkeypatch.setenv("REWARD_KEY", "given")
    path = settings.parent / "reward.py"
    path.write_text("import os\ndef f(key, **_): assert key == os.environ['REWARD_KEY']; return 1")
    function = ("custom_reward_function.name=f", "custom_reward_function.reward_kwargs.key=given")
    assert try_staged_reward(check(settings, *function)) is None
