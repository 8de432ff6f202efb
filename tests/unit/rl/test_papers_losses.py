"""Each policy loss with each aggregation equals its paper's formula in value and gradient.

The formulas are in tests/unit/rl/reference; the tolerance is 1e-6.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pipeline.rl.estimators.types import OneRank
from pipeline.rl.kl import kl_estimate
from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.aggregate import aggregation
from pipeline.rl.losses.choice import Choice, choose_clipped, choose_penalised
from pipeline.rl.losses.formulas import value_loss
from pipeline.rl.losses.types import LossTokens
from tests.exhaustive import sample_or_all
from tests.unit.rl.reference import losses as papers
from tests.unit.rl.reference.batch import Batch, Sample, batches

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
SCALE = 64.0
SETTINGS = SimpleNamespace(
    clip_low=0.2,
    clip_high=0.28,
    clip_ratio_c=3.0,
    tau_pos=1.0,
    tau_neg=1.05,
    policy_loss=SimpleNamespace(
        clip_cov_ratio=0.2, clip_cov_lb=0.1, clip_cov_ub=2.0, kl_cov_ratio=0.2, ppo_kl_coef=0.7
    ),
)
EXAMPLES = settings(
    deadline=None,
    max_examples=sample_or_all(15, 1000),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


class Samples:
    """The samples of a batch, all on one rank."""

    counts_samples = True

    def __init__(self, batch: Batch) -> None:
        sizes = [len(one.mask_L) for one in batch]
        self._sample_T = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(sizes))
        self._mask_T = joined(batch, "mask_L")
        self._number = len(batch)
        self.tokens_S = self.sum(torch.ones(len(self._mask_T), dtype=torch.float64))

    def sum(self, values_T: torch.Tensor) -> torch.Tensor:
        counted_T = torch.where(self._mask_T, values_T, 0)
        return counted_T.new_zeros(self._number).index_add(0, self._sample_T, counted_T)

    def mean(self, values_T: torch.Tensor) -> torch.Tensor:
        return self.sum(values_T) / self.tokens_S.clamp(min=1.0)

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        return values_S[self._sample_T]


def joined(batch: Batch, name: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([getattr(one, name) for one in batch]))


def tokens_of(batch: Batch, chosen_T: torch.Tensor | None) -> LossTokens:
    """Return the batch as one micro-batch."""
    return LossTokens(
        logprobs_T=joined(batch, "new_L").requires_grad_(),
        old_T=joined(batch, "old_L"),
        advantages_T=joined(batch, "advantages_L"),
        mask_T=joined(batch, "mask_L"),
        entropy_T=torch.zeros(len(joined(batch, "mask_L"))),
        weights_T=joined(batch, "weights_L"),
        samples=Samples(batch),
        chosen_T=chosen_T,
    )


def choice_of(batch: Batch) -> Choice:
    number = len(joined(batch, "mask_L"))
    return Choice(
        logprobs_T=joined(batch, "new_L").numpy(),
        old_T=joined(batch, "old_L").numpy(),
        advantages_T=joined(batch, "advantages_L").numpy(),
        mask_T=joined(batch, "mask_L").numpy(),
        drawn_T=np.random.default_rng(number).permutation(number).astype(np.uint64),
        ranks=OneRank(),
    )


def test_every_loss_has_a_paper():
    assert LOSSES.keys() == papers.LOSSES.keys()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", papers.LOSSES)
@given(batch=st.sampled_from([0.3, 1.5]).flatmap(batches))
@EXAMPLES
def test_a_loss_equals_its_papers_formula(name, mode, batch):
    choose = LOSSES[name].choose
    chosen_T = torch.from_numpy(choose(choice_of(batch), SETTINGS)) if choose else None
    tokens = tokens_of(batch, chosen_T)
    of_tokens = LOSSES[name].function(tokens, SETTINGS)
    added = aggregation(mode, tokens, SCALE)
    weights_T = 1.0 if added.weights_T is None else added.weights_T
    loss = torch.where(tokens.mask_T, of_tokens.loss_T * weights_T, 0).sum() / added.divisor
    (slopes_T,) = torch.autograd.grad(loss, tokens.logprobs_T)

    losses = [
        papers.LOSSES[name](one, SETTINGS, *more) if one.counted else papers.NOTHING
        for one, more in parts(batch, chosen_T)
    ]
    expected, slopes = papers.total(mode, batch, losses, SCALE)
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    counted = slopes_T[tokens.mask_T].numpy()
    assert counted == pytest.approx(np.concatenate(slopes), rel=1e-6, abs=1e-6)
    assert (slopes_T[~tokens.mask_T] == 0).all()


def parts(batch: Batch, chosen_T: torch.Tensor | None) -> list[tuple[Sample, tuple[Any, ...]]]:
    """Return each sample with its chosen tokens: a flag for each token in the loss.

    If the loss chooses no tokens, there are no flags.
    """
    if chosen_T is None:
        return [(one, ()) for one in batch]
    cut = torch.split(chosen_T, [len(one.mask_L) for one in batch])
    return [(one, (own.numpy()[one.mask_L],)) for one, own in zip(batch, cut, strict=True)]


@given(batch=batches(spread=0.3))
@EXAMPLES
def test_the_covariance_chooses_the_papers_tokens(batch):
    """The choice matches equations 10, 11 and 13 of arXiv 2505.22617.

    A token's covariance is (log p - mean) (A - mean). KL-Cov chooses the tokens with the largest
    covariances. Clip-Cov draws from the tokens whose covariance is between two bounds.
    """
    mask_T, new_T = joined(batch, "mask_L").numpy(), joined(batch, "new_L").numpy()
    advantages_T = joined(batch, "advantages_L").numpy()
    covariance_T = (new_T - new_T[mask_T].mean()) * (advantages_T - advantages_T[mask_T].mean())
    number = max(1, int(0.2 * mask_T.sum()))

    penalised_T = choose_penalised(choice_of(batch), SETTINGS)
    assert not penalised_T[~mask_T].any()
    assert penalised_T.sum() == number
    rest_T = mask_T & ~penalised_T
    assert covariance_T[penalised_T].min() >= covariance_T[rest_T].max(initial=-np.inf) - 1e-9

    ratio_T = np.exp(new_T - joined(batch, "old_L").numpy())
    cut_T = -advantages_T * np.clip(ratio_T, 0.8, 1.28) > -advantages_T * ratio_T
    among_T = mask_T & ~cut_T & (covariance_T > 0.1) & (covariance_T < 2.0)
    clipped_T = choose_clipped(choice_of(batch), SETTINGS)
    assert not clipped_T[~among_T].any()
    assert clipped_T.sum() == min(number, among_T.sum())


@pytest.mark.parametrize("estimator", ["kl", "abs", "mse", "low_var_kl"])
@given(numbers=st.lists(st.floats(-2, 0), min_size=2, max_size=10))
@EXAMPLES
def test_a_kl_equals_its_estimator(estimator, numbers):
    new_T, reference_T = torch.tensor(numbers, dtype=torch.float64), torch.tensor(numbers[::-1])
    found_T = kl_estimate(new_T, reference_T.double(), estimator)
    expected = [papers.kl(estimator, *pair) for pair in zip(numbers, numbers[::-1], strict=True)]
    assert found_T.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(batch=batches())
@EXAMPLES
def test_the_value_loss_equals_its_formula(batch):
    predicted_T = joined(batch, "values_L").requires_grad_()
    before_T, target_T = joined(batch, "advantages_L"), joined(batch, "scores_L")
    found_T = value_loss(predicted_T, before_T, target_T, 0.5).loss_T
    (slopes_T,) = torch.autograd.grad(found_T.sum(), predicted_T)
    rows = zip(predicted_T.tolist(), before_T.tolist(), target_T.tolist(), strict=True)
    losses, slopes = zip(*(papers.value(*row, 0.5) for row in rows), strict=True)
    assert found_T.tolist() == pytest.approx(losses, rel=1e-6, abs=1e-6)
    assert slopes_T.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-6)
