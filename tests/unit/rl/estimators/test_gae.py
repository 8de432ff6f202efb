"""GAE on samples of any length, compared with the paper's sums, computed and whitened in numpy."""

from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.rl.estimators.gae import gae
from pipeline.rl.estimators.types import OneRank, Rollouts

SETTINGS = SimpleNamespace(gamma=0.97, lam=0.9)
LENGTHS = (5, 1, 0, 12, 7)


def rollouts(seed: int, values: bool = True, rewards_at_counted: bool = True) -> Rollouts:
    """Return ragged samples with random scores; some tokens are excluded from the loss."""
    rng = np.random.default_rng(seed)
    tokens = sum(LENGTHS)
    mask_T = rng.random(tokens) < 0.8
    scores_T = rng.normal(size=tokens)
    if rewards_at_counted:
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


def by_the_paper(of: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """Return A_t = sum over l of (gamma lam)^l d_(t+l), equation 16 of arXiv 1506.02438, and A + V.

    The sum is over each sample's tokens in the loss.
    """
    advantages, returns = np.zeros(len(of.scores_T)), np.zeros(len(of.scores_T))
    start = 0
    for length in of.lengths_X:
        at = [t for t in range(start, start + length) if of.mask_T[t]]
        values = [of.values_T[t] for t in at] + [0.0]
        errors = [
            of.scores_T[t] + SETTINGS.gamma * values[i + 1] - values[i] for i, t in enumerate(at)
        ]
        for i, t in enumerate(at):
            weights = (SETTINGS.gamma * SETTINGS.lam) ** np.arange(len(at) - i)
            advantages[t] = weights @ errors[i:]
            returns[t] = advantages[t] + values[i]
        start += length
    return advantages, returns


@pytest.mark.parametrize("seed", range(5))
def test_advantages_equal_the_papers_sum_whitened(seed: int):
    of = rollouts(seed)
    advantages_T, returns_T = by_the_paper(of)
    counted = advantages_T[of.mask_T]
    whitened = (counted - counted.mean()) / np.sqrt(counted.var(ddof=1) + 1e-8)
    found = gae(of, SETTINGS)
    assert np.abs(found.advantages_T[of.mask_T] - whitened).max() < 1e-12
    assert np.abs(found.returns_T[of.mask_T] - returns_T[of.mask_T]).max() < 1e-12


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
