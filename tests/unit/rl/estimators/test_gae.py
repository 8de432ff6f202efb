"""Edge cases of GAE; test_papers_estimators.py checks its values."""

from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.rl.estimators.advantage_formulas import gae
from pipeline.rl.estimators.types import OneRank, Rollouts

SETTINGS = SimpleNamespace(gamma=0.97, lam=0.9)
LENGTHS = (5, 1, 0, 12, 7)


def rollouts(seed: int, values: bool = True) -> Rollouts:
    """Return ragged samples with random scores; some tokens are excluded from the loss."""
    rng = np.random.default_rng(seed)
    tokens = sum(LENGTHS)
    mask_T = rng.random(tokens) < 0.8
    scores_T = rng.normal(size=tokens)
    scores_T[~mask_T] = 0.0
    return Rollouts(
        rewards_N=np.zeros(len(LENGTHS)),
        groups_N=np.zeros(len(LENGTHS), np.int64),
        rows_X=np.arange(len(LENGTHS)),
        lengths_X=np.array(LENGTHS),
        mask_T=mask_T,
        scores_T=scores_T,
        ranks=OneRank(),
        values_T=rng.normal(size=tokens) if values else None,
    )


def test_a_reward_after_the_last_token_that_counts_belongs_to_that_token():
    """The sample ends with an environment's token, which carries the reward. verl would drop the
    reward."""
    of = rollouts(0)
    behind, before = (of.scores_T.copy() for _ in range(2))
    of.mask_T[:5] = [True, True, True, False, False]
    behind[:5], before[:5] = [0, 0, 0, 0, 2.0], [0, 0, 2.0, 0, 0]
    ours, same = (
        gae(Rollouts(**{**vars(of), "scores_T": scores_T}), SETTINGS)
        for scores_T in (behind, before)
    )
    assert np.array_equal(ours.advantages_T, same.advantages_T)
    assert np.array_equal(ours.returns_T, same.returns_T)


def test_values_of_tokens_that_do_not_count_are_ignored():
    of = rollouts(1)
    other = np.where(of.mask_T, of.values_T, 1e6)
    for name in ("advantages_T", "returns_T"):
        found, changed = (
            getattr(gae(Rollouts(**{**vars(of), "values_T": values_T}), SETTINGS), name)
            for values_T in (of.values_T, other)
        )
        assert np.array_equal(found[of.mask_T], changed[of.mask_T])
        assert np.isfinite(changed).all()


def test_a_rank_without_samples_has_no_advantages():
    whole = rollouts(2)
    names = ("rows_X", "lengths_X", "mask_T", "scores_T", "values_T")
    empty = Rollouts(**{**vars(whole), **{name: getattr(whole, name)[:0] for name in names}})
    found = gae(empty, SETTINGS)
    assert found.advantages_T.shape == found.returns_T.shape == (0,)


def test_a_step_without_values_is_refused():
    with pytest.raises(ValueError, match="requires a critic"):
        gae(rollouts(0, values=False), SETTINGS)
