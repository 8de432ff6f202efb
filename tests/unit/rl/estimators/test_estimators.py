"""Edge cases of the estimators; test_papers_estimators.py checks their values."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.rl.estimators.advantage_formulas import (
    Groups,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    returns,
    rloo,
)
from pipeline.rl.estimators.types import OneRank, Rollouts
from tests.unit.rl.estimators.steps import Settings, estimated, in_parts, steps

OF_GROUPS = (grpo, grpo_passk, rloo, opo, gpg)


def test_remax_gives_0_if_a_prompts_greedy_sample_has_no_reward():
    found = remax(replace(one_group([1.0, 2.0]), baseline_N=np.array([np.nan, 0.5])), Settings())
    assert found.advantages_T.tolist() == [0.0, 1.5]


def test_remax_needs_greedy_samples():
    with pytest.raises(ValueError, match="greedy samples"):
        remax(replace(one_group([1.0, 2.0]), baseline_N=None), Settings())


EVERY: list[Callable] = [
    *OF_GROUPS,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
]


@pytest.mark.parametrize("estimator", EVERY, ids=lambda one: one.__name__)
@given(whole=steps(), data=st.data())
@settings(deadline=None, max_examples=15)
def test_advantages_do_not_depend_on_the_distribution_over_ranks(estimator, whole, data):
    """Samples are assigned to ranks at random; a rank may have 0 samples."""
    how = Settings(gamma=0.95)
    count = len(whole.lengths_X)
    ranks = data.draw(st.integers(2, 4))
    rank_X = np.array(
        data.draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count))
    )
    rows = [np.flatnonzero(rank_X == rank) for rank in range(ranks)]
    expected = estimator(whole, how).advantages_T
    parts = estimated(in_parts(whole, rows), lambda part: estimator(part, how))
    for of_rank, part in zip(rows, parts, strict=True):
        at = np.concatenate(
            [np.empty(0, int), *(np.flatnonzero(whole.sample_T == row) for row in of_rank)]
        ).astype(int)
        assert part.advantages_T == pytest.approx(expected[at], rel=1e-12, abs=1e-12)


def one_group(rewards: list[float], lengths: list[int] | None = None) -> Rollouts:
    """Return a step with one group on one rank; samples without a reward are excluded from
    the loss."""
    lengths_X = np.array(lengths or [1] * len(rewards))
    scores_T = np.zeros(lengths_X.sum())
    scores_T[(np.cumsum(lengths_X) - 1)[lengths_X > 0]] = np.nan_to_num(rewards)[lengths_X > 0]
    return Rollouts(
        rewards_N=np.array(rewards),
        groups_N=np.zeros(len(rewards), np.int64),
        rows_X=np.arange(len(rewards)),
        lengths_X=lengths_X,
        mask_T=~np.isnan(np.repeat(rewards, lengths_X)),
        scores_T=scores_T,
        ranks=OneRank(),
    )


def test_grpo_uses_the_group_mean_and_unbiased_deviation():
    """The rewards 1, 2, 3, 6 have the mean 3 and the variance ((-2)^2 + 1 + 0 + 9) / 3."""
    rollouts = one_group([1.0, 2, 3, 6])
    std = math.sqrt(14 / 3) + 1e-6
    found = grpo(rollouts, Settings()).advantages_T
    assert found == pytest.approx([-2 / std, -1 / std, 0, 3 / std])
    centred = grpo(rollouts, Settings(norm_adv_by_std_in_grpo=False))
    assert centred.advantages_T == pytest.approx([-2, -1, 0, 3])


def test_a_response_without_a_token_still_counts_in_its_group():
    """The response has a reward, but no token for its score."""
    found = grpo(one_group([1.0, 3.0], [0, 2]), Settings(norm_adv_by_std_in_grpo=False))
    assert found.advantages_T.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "estimator", [*OF_GROUPS, reinforce_plus_plus_baseline], ids=lambda one: one.__name__
)
def test_a_group_masked_down_to_one_sample_has_advantage_0(estimator):
    assert estimator(one_group([np.nan, 2.0, np.nan]), Settings()).advantages_T.tolist() == [0] * 3


def test_gpg_scales_by_the_only_sample_with_a_score():
    found = gpg(one_group([0.0, 1.0, 0.0, 0.0]), Settings())
    assert found.advantages_T.tolist() == [-1.0, 3.0, -1.0, -1.0]


def test_opo_leaves_out_the_tokens_of_samples_without_a_reward():
    """The last sample's tokens are in the loss, but its reward is unknown."""
    step = replace(one_group([1.0, 0.0, math.nan], [1, 3, 4]), mask_T=np.ones(8, bool))
    found = opo(step, Settings())
    assert found.advantages_T.tolist() == [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0]


def test_a_weighted_mean_needs_a_weight_above_0():
    scores_N = np.array([1.0, 3.0, 1.0, 3.0])
    groups = Groups(scores_N, np.array([0, 0, 1, 1]), scores_N > 0, np.array([2.0, 2.0]))
    assert groups.centred_N(np.array([1.0, 0.0, 0.0, 0.0])).tolist() == [0.0, 2.0, 0.0, 0.0]


def test_equal_rewards_have_advantages_of_exactly_0():
    """The mean of three rewards of 0.1 is not exactly 0.1.

    Without special treatment, the rounding error would be divided by a standard deviation that also
    consists only of rounding errors.
    """
    for estimator in (*OF_GROUPS, reinforce_plus_plus_baseline):
        assert estimator(one_group([0.1] * 3), Settings()).advantages_T.tolist() == [0, 0, 0]


def test_a_step_without_a_token_that_counts_has_advantages_of_0():
    for estimator in EVERY:
        rollouts = replace(one_group([np.nan, np.nan]), baseline_N=np.zeros(2))
        assert estimator(rollouts, Settings()).advantages_T.tolist() == [0, 0]


def test_tokens_of_an_environment_do_not_discount_returns():
    """The samples are s s e s and s s e e, and gamma is 1/2; tokens e are excluded from the loss.

    A token e is not a step in time. If a sample ends with a token e, the reward at that token
    belongs to the last step before it, as in GAE.
    """
    rollouts = replace(one_group([8.0], [4]), mask_T=np.array([True, True, False, True]))
    assert returns(rollouts, 0.5)[rollouts.mask_T].tolist() == [2, 4, 8]
    rollouts = replace(one_group([8.0], [4]), mask_T=np.array([True, True, False, False]))
    assert returns(rollouts, 0.5)[rollouts.mask_T].tolist() == [4, 8]
