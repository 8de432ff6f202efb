"""Estimators are selected by name or file; unsuitable settings are refused or noted."""

import pytest

from pipeline.config.identity import differing
from pipeline.config.rules.algorithms.estimators import estimator_problems
from pipeline.errors import InputError
from tests.unit.config.settings import load, notes

ESTIMATOR = "algorithm.adv_estimator"


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("grop", "did you mean grpo?"),
        ("ppo", "did you mean gae?"),
        ("GRPO_vectorized", "did you mean grpo?"),
        ("my.py", "add the name of its function: my.py:my_function"),
        ("a.txt:f", "the default"),
    ],
)
def test_an_unknown_name_is_refused(tmp_path, value, fix):
    with pytest.raises(InputError) as caught:
        load(tmp_path, f"{ESTIMATOR}={value}")
    (problem,) = caught.value.problems
    assert problem.startswith(f"{ESTIMATOR}: found {value!r} (text), expected one of grpo, ")
    assert "or path/to/file.py:function; " in problem
    assert fix in problem


@pytest.mark.parametrize("value", ["rloo", "mine.py:f", "s3://bucket/mine.py:f"])
def test_a_name_or_a_file_is_accepted(tmp_path, value):
    assert load(tmp_path, f"{ESTIMATOR}={value}").config.algorithm.adv_estimator == value


def test_groups_of_one_sample_are_refused(tmp_path):
    one = "actor_rollout_ref.rollout.n=1"
    (problem,) = estimator_problems(load(tmp_path, one).config)
    assert problem.startswith(f"{ESTIMATOR}: found grpo, which compares the samples of a prompt")
    assert "(reinforce_plus_plus, remax, gae)" in problem
    for free in ("reinforce_plus_plus", "remax", "mine.py:f"):
        assert list(estimator_problems(load(tmp_path, one, f"{ESTIMATOR}={free}").config)) == []


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        (
            ["algorithm.gamma=0.9"],
            "gamma: 0.9 has no effect without algorithm.adv_estimator=rei",
        ),
        ([f"{ESTIMATOR}=rloo", "algorithm.norm_adv_by_std_in_grpo=False"], "norm_adv_by_std_in_g"),
        (
            ["algorithm.kl_penalty=abs"],
            "kl_penalty: abs has no effect without algorithm.use_kl_in",
        ),
        (
            ["algorithm.kl_ctrl.kl_coef=0.1"],
            "kl_ctrl.kl_coef: 0.1 has no effect without algorithm.use_kl",
        ),
        (
            ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.horizon=9"],
            "kl_ctrl.horizon: 9 has no effect without algorithm.kl_ctrl.type=adaptive",
        ),
        (
            ["algorithm.filter_groups.metric=acc"],
            "filter_groups.metric: acc has no effect without algorithm.filter_groups.enable=true",
        ),
    ],
)
def test_settings_that_are_not_read_are_noted(tmp_path, settings, noted):
    assert [n for n in notes(tmp_path, *settings) if n.startswith(f"algorithm.{noted}")]


def test_settings_that_are_read_are_not_noted(tmp_path):
    settings = (f"{ESTIMATOR}=reinforce_plus_plus", "algorithm.gamma=0.9")
    kl = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl={type: adaptive, horizon: 9}")
    assert not [note for note in notes(tmp_path, *settings, *kl) if "no effect" in note]


def test_only_a_functions_name_belongs_to_the_identity(tmp_path):
    """The file's content is compared when the file is staged."""
    old, moved, other = (
        load(tmp_path, f"{ESTIMATOR}={value}").config for value in ("a.py:f", "b/c.py:f", "a.py:g")
    )
    assert differing(old, moved) == {}
    assert differing(old, other) == {ESTIMATOR: ("a.py:f", "a.py:g")}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["horizon=52"], None),
        (["horizon=51"], "horizon: found 51, but a step of 256 samples may lower the coefficient"),
        (["kl_coef=0"], "kl_coef: found 0.0, but kl_ctrl.type=adaptive multiplies it"),
    ],
)
def test_an_adaptive_coefficient_stays_above_zero(tmp_path, settings, problem):
    """In a step with 256 samples (8 for each of 32 prompts), the coefficient falls by a fraction
    of at most 0.2 * 256 / horizon."""
    settings = [f"algorithm.kl_ctrl.{one}" for one in [*settings, "type=adaptive"]]
    assert list(estimator_problems(load(tmp_path, *settings).config)) == []
    config = load(tmp_path, *settings, "algorithm.use_kl_in_reward=True").config
    found = list(estimator_problems(config))
    assert len(found) == (problem is not None)
    assert all(one.startswith(f"algorithm.kl_ctrl.{problem}") for one in found)
