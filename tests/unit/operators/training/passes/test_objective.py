"""In every mode, the loss of a mini-batch does not depend on its division into micro-batches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from operators.training.passes.objective import (
    Objective,
    Targets,
    loss_and_report,
    loss_of,
    objective_of,
)
from pipeline.config.actor import Actor
from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.aggregate import Totals
from pipeline.rl.losses.formulas import reinforce
from tests.integration.training_replay.sealed import config_of
from tests.unit.rl.losses.batches import LENGTHS, OneRank, make_tokens

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
NORM = 7.0


def plain(mode: str, values_T: np.ndarray, sample_T: np.ndarray, mask_T: np.ndarray) -> float:
    """Compute verl's agg_loss over the samples with at least one token in the mask."""
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
def test_the_loss_is_a_mean_over_the_entire_mini_batch(name: str, mode: str, cuts: Any):
    """loss_agg_mode is the mode for KL and entropy; the policy loss may have a different mode."""
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


def test_samples_without_a_token_that_counts_are_left_out_of_means():
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


@pytest.mark.parametrize(("factor", "expected"), [(None, 64), (7, 7)])
def test_the_norm_is_the_factor_or_the_longest_response(factor: int | None, expected: float):
    config = config_of(loss_scale_factor=factor)
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"max_response_length": 64})}
    )
    assert objective_of(config).scale_factor == expected


def test_bypass_mode_with_reinforce_replaces_the_policy_loss():
    correction = {"rollout_correction": {"preset": "bypass_pg_is"}}
    assert loss_of(config_of(algorithm=correction)).function is reinforce
    correction = {"rollout_correction": {"preset": "bypass_ppo_clip"}}
    chosen = config_of(algorithm=correction, policy_loss={"loss_mode": "gpg"})
    for config in (chosen, config_of(policy_loss={"loss_mode": "gpg"})):
        assert loss_of(config) is LOSSES["gpg"]
        assert loss_of(config, reinforce).function is reinforce  # a user's own loss


@pytest.mark.parametrize(
    ("loss", "mode", "others", "differs"),
    [
        ("gspo", "token-mean", {"entropy_coeff": 0.1}, True),
        ("gspo", "token-mean", {"use_kl_loss": True}, True),
        ("gspo", "token-mean", {}, False),
        ("gspo", "token-mean", {"entropy_coeff": 1.0}, True),
        ("gspo", "seq-mean-token-sum", {"entropy_coeff": 0.1, "use_kl_loss": True}, False),
        ("vanilla", "token-mean", {"entropy_coeff": 0.1, "use_kl_loss": True}, False),
    ],
)
def test_kl_and_entropy_may_have_another_divisor(loss: str, mode: Any, others: Any, differs: bool):
    """GSPO's loss is always a mean over samples."""
    actor = {"policy_loss": {"loss_mode": loss}, "loss_agg_mode": mode, "entropy_coeff": 0.0}
    assert objective_of(config_of(**{**actor, **others})).has_other_divisor is differs
