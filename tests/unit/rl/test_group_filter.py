"""Which groups dynamic sampling accepts, and why not the others."""

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
def test_each_group_is_accepted_or_rejected_and_more_groups_change_no_earlier_verdict(
    values, seen, wanted
):
    """So a flow that comes back, or sees the groups sub-plan by sub-plan, chooses the same."""
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
        ("rubric", 0.25, {"rubric": 3}, 3.0),
        ("rubric", None, {}, None),
    ],
)
def test_metrics(metric, reward, extras, value):
    assert metric_value(metric, reward, extras) == value


def test_a_score_without_its_penalty_is_what_it_was():
    """A sum of doubles is rounded; the rest of it would be variance where there is none."""
    penalties = [-(k / 7) * 0.3 for k in range(8)]
    scores = {metric_value("acc", 0.1 + p, {"overlong_reward": p}) for p in penalties}
    assert scores == {0.1}


@pytest.mark.parametrize(
    ("extras", "says"),
    [
        ({"acc": 1}, r"only \['acc'\] beside the score, expected a number under 'rubric'"),
        ({"rubric": "good"}, "'good' there beside the score, expected a number under 'rubric'"),
    ],
)
def test_a_metric_that_is_not_there(extras, says):
    with pytest.raises(ValueError, match=says):
        metric_value("rubric", 1.0, extras)
