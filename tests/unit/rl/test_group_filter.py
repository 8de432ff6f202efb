"""The groups that dynamic sampling accepts, and why it rejects others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.rl.group_filter import FULL, ChosenGroups, choose, metric_value


def test_the_first_groups_with_variance_are_accepted():
    groups = {
        "a": [1.0, 1.0, 1.0],
        "b": [0.0, 1.0, None],
        "c": [0.0, None, None],
        "d": [None, None, None],
        "e": [0.5, 0.5, None],
        "f": [0.0, 0.0, 1.0],
        "g": [0.0, 1.0, 1.0],
        "h": [0.0, 0.0, 0.0],
    }
    assert choose(groups, "acc", 2) == ChosenGroups(
        ("b", "f"),
        {
            "a": "acc is 1 in all samples",
            "c": "fewer than two samples have acc",
            "d": "fewer than two samples have acc",
            "e": "acc is 0.5 in all samples",
            "g": FULL,
            "h": "acc is 0 in all samples",
        },
    )
    assert choose(groups, "acc", 9).accepted == ("b", "f", "g")


@given(
    st.lists(st.lists(st.sampled_from([None, 0.0, 1.0, 0.5]), min_size=1, max_size=4), max_size=12),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_each_group_is_accepted_or_rejected_and_later_groups_do_not_change_a_verdict(
    values, seen, wanted
):
    """A flow therefore chooses the same groups even after a restart or when it reads one sub-plan
    at a time."""
    groups = {str(i): group for i, group in enumerate(values)}
    whole = choose(groups, "m", wanted)
    assert sorted([*whole.accepted, *whole.rejected]) == sorted(groups)
    first = choose(dict(list(groups.items())[:seen]), "m", wanted)
    assert whole.accepted[: len(first.accepted)] == first.accepted
    assert first.rejected.items() <= whole.rejected.items()


@pytest.mark.parametrize(
    ("metric", "reward", "extras", "value"),
    [
        ("seq_reward", 0.25, {"acc": True, "overlong_reward": -0.75}, 0.25),
        ("seq_final_reward", 0.25, {}, 0.25),
        ("score", 0.25, {"acc": True, "overlong_reward": -0.75}, 1.0),
        ("score", 0.25, {}, 0.25),
        ("acc", 0.25, {"acc": True, "overlong_reward": -0.75}, 1.0),
        ("acc", 0.25, {"overlong_reward": -0.75}, 1.0),
        ("acc", 0.25, {"acc": 0.5, "overlong_reward": -0.75}, 0.5),
        ("rubric", 0.25, {"rubric": 3}, 3.0),
        ("rubric", None, {}, None),
    ],
)
def test_a_sample_has_a_value_for_each_metric(metric, reward, extras, value):
    assert metric_value(metric, reward, extras) == value


def test_the_score_is_recovered_exactly_from_a_penalised_reward():
    """The sum of score and penalty is rounded, and rounding errors would look like variance."""
    penalties = [-(k / 7) * 0.3 for k in range(8)]
    scores = {metric_value("acc", 0.1 + p, {"overlong_reward": p}) for p in penalties}
    assert scores == {0.1}


def test_scores_are_recovered_with_nine_decimals():
    """With penalties of millions, rounding errors are below 5e-10. Scores that differ by 1e-9 stay
    different."""
    penalties = [-(k / 7) * 3e6 for k in range(8)]
    scores = {metric_value("acc", 0.1 + p, {"overlong_reward": p}) for p in penalties}
    assert scores == {0.1}
    close = [metric_value("acc", score, {}) for score in (0.123456788, 0.123456789)]
    assert close == [0.123456788, 0.123456789]


@pytest.mark.parametrize(
    ("extras", "says"),
    [
        ({"acc": 1}, r"only \['acc'\] in addition to the score, expected a number under 'rubric'"),
        ({"rubric": "good"}, "'good' in addition to the score, expected a number under 'rubric'"),
    ],
)
def test_a_missing_metric_is_refused(extras, says):
    with pytest.raises(ValueError, match=says):
        metric_value("rubric", 1.0, extras)
