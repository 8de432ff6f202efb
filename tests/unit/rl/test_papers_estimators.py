"""Each advantage estimator equals its paper's formula (tests/unit/rl/reference) to 1e-6."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pipeline.rl.estimator_table import ESTIMATORS
from pipeline.rl.estimators.types import OneRank, Rollouts
from tests.exhaustive import sample_or_all
from tests.unit.rl.reference import estimators as papers
from tests.unit.rl.reference.batch import Batch, batches

EXAMPLES = settings(
    deadline=None,
    max_examples=sample_or_all(15, 1000),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


def rollouts_of(batch: Batch) -> Rollouts:
    """Return the batch as a single data-parallel rank would have it."""
    return Rollouts(
        rewards_N=np.array([one.reward for one in batch]),
        groups_N=np.array([one.group for one in batch]),
        rows_X=np.arange(len(batch)),
        lengths_X=np.array([len(one.mask_L) for one in batch]),
        mask_T=np.concatenate([one.mask_L for one in batch]),
        scores_T=np.concatenate([one.scores_L for one in batch]),
        ranks=OneRank(),
        values_T=np.concatenate([one.values_L for one in batch]),
        baseline_N=np.array([one.baseline for one in batch]),
    )


def counted(batch: Batch, numbers: list[list[float]]) -> list[float]:
    """Return the numbers for the tokens included in the loss."""
    return [of[token] for one, of in zip(batch, numbers, strict=True) for token in one.counted]


def test_every_estimator_has_a_paper():
    assert ESTIMATORS.keys() == papers.ESTIMATORS.keys()


@pytest.mark.parametrize("name", papers.ESTIMATORS)
@given(batch=batches(), by_std=st.booleans(), gamma=st.sampled_from([1.0, 0.9]))
@EXAMPLES
def test_an_estimator_equals_its_papers_formula(name, batch, by_std, gamma):
    chosen = SimpleNamespace(norm_adv_by_std_in_grpo=by_std, gamma=gamma, lam=0.8)
    rollouts = rollouts_of(batch)
    found = ESTIMATORS[name].function(rollouts, chosen)
    expected = counted(batch, papers.ESTIMATORS[name](batch, chosen))
    assert found.advantages_T[rollouts.mask_T] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(batch=batches(), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.5]))
@EXAMPLES
def test_a_critic_learns_the_returns_of_gae(batch, gamma, lam):
    chosen = SimpleNamespace(gamma=gamma, lam=lam)
    rollouts = rollouts_of(batch)
    found = ESTIMATORS["gae"].function(rollouts, chosen).returns_T
    assert found is not None
    expected = counted(batch, papers.gae_returns(batch, chosen))
    assert found[rollouts.mask_T] == pytest.approx(expected, rel=1e-6, abs=1e-6)
