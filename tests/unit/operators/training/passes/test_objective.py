"""The loss of a mini-batch does not depend on its cut into micro-batches, in any mode."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from operators.training.passes.objective import Objective, Targets, loss_and_report
from pipeline.config.actor import Actor
from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.aggregate import Totals
from tests.unit.rl.losses.batches import LENGTHS, OneRank, make_tokens

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
NORM = 7.0


def plain(mode: str, values_T: np.ndarray, sample_T: np.ndarray, mask_T: np.ndarray) -> float:
    """verl's agg_loss, over samples that have a token that counts."""
    of_samples = [values_T[(sample_T == s) & mask_T] for s in range(len(LENGTHS))]
    of_samples = [values for values in of_samples if len(values)]
    return {
        "token-mean": lambda: np.concatenate(of_samples).mean(),
        "seq-mean-token-sum": lambda: np.mean([values.sum() for values in of_samples]),
        "seq-mean-token-mean": lambda: np.mean([values.mean() for values in of_samples]),
        "seq-mean-token-sum-norm": lambda: np.mean([values.sum() / NORM for values in of_samples]),
    }[mode]()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cuts", [((0, 1, 2, 3, 4, 5),), ((0, 3), (1,), (2, 4, 5))])
def test_a_loss_is_its_mean_over_the_whole_mini_batch(name: str, mode: str, cuts: Any):
    """KL and entropy by loss_agg_mode, the policy loss by its own mode where it has one: sums of
    micro-batches, divided by the sum of their divisors as Megatron does."""
    actor = Actor(
        entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.7, loss_agg_mode=mode, kl_loss_type="kl"
    )
    loss = LOSSES[name]
    own = loss.aggregation or mode
    objective = Objective(actor, loss.function, own, NORM)
    whole = make_tokens(1)
    sample_T, mask_T = whole.samples.sample_T.numpy(), whole.mask_T.numpy()
    reference_T = whole.old_T * 1.1
    totals = Totals(int(mask_T.sum()), len({*sample_T[mask_T].tolist()}))
    total, divisor, reports = 0.0, 0, []
    for cut in cuts:
        of_cut = torch.from_numpy(np.isin(sample_T, cut))
        numbers = torch.from_numpy(np.searchsorted(cut, sample_T[of_cut.numpy()]))
        targets = Targets(
            mask_T=whole.mask_T[of_cut],
            advantages_T=whole.advantages_T[of_cut],
            old_T=whole.old_T[of_cut],
            reference_T=reference_T[of_cut],
            weights_T=None,
            samples=OneRank(numbers, whole.mask_T[of_cut], len(cut)),
            chosen_T=whole.chosen_T[of_cut],
        )
        made, part, report = loss_and_report(
            objective, targets, totals, whole.logprobs_T[of_cut], whole.entropy_T[of_cut]
        )
        total, divisor = total + made, divisor + int(part)
        reports.append(report)
    assert divisor == totals.divisor(own)
    loss_T = loss.function(whole, actor).loss_T.detach().numpy()
    policy = plain(own, loss_T, sample_T, mask_T)
    kl = plain(mode, (whole.logprobs_T.detach() - reference_T).numpy(), sample_T, mask_T)
    entropy = plain(mode, whole.entropy_T.numpy(), sample_T, mask_T)
    assert float(total.detach()) / divisor == pytest.approx(policy + 0.7 * kl - 0.3 * entropy)
    assert sum(float(r["kl"]) for r in reports) / divisor == pytest.approx(kl)
    assert sum(float(r["policy"]) for r in reports) / divisor == pytest.approx(policy)


def test_samples_without_a_token_that_counts_are_no_part_of_a_mean():
    made = make_tokens(1)
    empty = replace(made, mask_T=torch.zeros_like(made.mask_T))
    targets = Targets(
        empty.mask_T, made.advantages_T, made.old_T, None, None,
        OneRank(made.samples.sample_T, empty.mask_T), None,
    )  # fmt: skip
    for mode in MODES:
        objective = Objective(Actor(loss_agg_mode=mode), LOSSES["vanilla"].function, mode, NORM)
        loss, divisor, _ = loss_and_report(
            objective, targets, Totals(0, 0), made.logprobs_T, made.entropy_T
        )
        assert (float(loss.detach()), int(divisor)) == (0, 0)
