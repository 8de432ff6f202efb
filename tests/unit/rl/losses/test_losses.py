"""Gradients, reports and edge cases of all losses; test_papers_losses.py checks their values."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.formulas import reinforce
from tests.unit.rl.losses.batches import ACTOR, make_tokens


def counted(loss_T: torch.Tensor, tokens) -> np.ndarray:
    return loss_T.detach()[tokens.mask_T].numpy()


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_the_policy_gradient(name: str):
    """At new = old, every loss averaged per sample has gradient -A / (tokens in the sample).

    Clip-Cov and KL-Cov choose no tokens here.
    """
    made = make_tokens(5)
    none_T = torch.zeros_like(made.mask_T)
    tokens = replace(made, old_T=made.logprobs_T.detach().clone(), chosen_T=none_T)
    loss_T = LOSSES[name].function(tokens, ACTOR).loss_T
    tokens.samples.mean(loss_T).sum().backward()
    expected_T = -tokens.advantages_T / tokens.samples.spread(tokens.samples.tokens_S.clamp(min=1))
    expected_T = torch.where(tokens.mask_T, expected_T, 0)
    assert tokens.logprobs_T.grad.numpy() == pytest.approx(expected_T.numpy(), rel=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_that_do_not_count_do_not_change_losses_or_gradients(name: str):
    """Changing the values of excluded tokens affects no other token's loss or gradient."""
    made = make_tokens(6)
    results = []
    for add in (0.0, 3.0):
        new_T = (made.logprobs_T.detach() - add * ~made.mask_T).requires_grad_()
        tokens = replace(
            made, logprobs_T=new_T, advantages_T=made.advantages_T + add * ~made.mask_T
        )
        loss_T = LOSSES[name].function(tokens, ACTOR).loss_T
        torch.where(made.mask_T, loss_T, 0).sum().backward()
        results.append((counted(loss_T, made), new_T.grad[made.mask_T].numpy()))
    for first, second in zip(*results, strict=True):
        assert (first == second).all()


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_reports_the_log_ratio_and_its_numbers_per_token(name: str):
    tokens = make_tokens(7)
    reports = LOSSES[name].function(tokens, ACTOR).reports
    assert {value_T.shape for value_T in reports.values()} == {tokens.mask_T.shape}
    expected_T = (tokens.logprobs_T - tokens.old_T).detach()
    assert reports["log_ratio"].detach().numpy() == pytest.approx(expected_T.numpy())


def test_losses_of_distant_log_probs_are_finite():
    """Every loss clamps log-ratios of +-400 in float32."""
    made = make_tokens(8)
    for name, loss in LOSSES.items():
        for distance in (-400.0, 400.0):
            new_T = torch.full_like(made.old_T, -450.0, dtype=torch.float32).requires_grad_()
            tokens = replace(made, logprobs_T=new_T, old_T=new_T.detach() - distance)
            loss_T = loss.function(tokens, ACTOR).loss_T
            loss_T.sum().backward()
            assert loss_T.isfinite().all(), name
            assert new_T.grad.isfinite().all(), name


def test_gmpo_clips_no_token_with_an_advantage_of_0():
    made = make_tokens(14, spread=1.5)
    reports = (
        LOSSES["geo_mean"]
        .function(replace(made, advantages_T=torch.zeros_like(made.old_T)), ACTOR)
        .reports
    )
    assert not reports["clipped"].any()
    assert not reports["dual_clipped"].any()


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_an_advantage_of_0_counts_as_negative_in_dppo(name: str):
    """A token is clipped if its probability has fallen too far, but not if it has risen."""
    made = make_tokens(13)
    T = len(made.old_T)
    rises_T = torch.arange(T) % 2 == 0
    old_T, new_T = (torch.where(rises_T, *pair).log() for pair in ((0.1, 0.9), (0.9, 0.1)))
    tokens = replace(made, logprobs_T=new_T, old_T=old_T, advantages_T=torch.zeros(T))
    clipped_T = LOSSES[name].function(tokens, ACTOR).reports["clipped"]
    assert clipped_T.tolist() == (~rises_T).tolist()


@pytest.mark.parametrize("weighted", [False, True])
def test_reinforce_is_the_weighted_policy_gradient(weighted: bool):
    tokens = make_tokens(11, of_sample=False, weighted=weighted)
    found = reinforce(tokens, ACTOR)
    new_T = tokens.logprobs_T.detach()
    factor_T = -tokens.advantages_T * (tokens.weights_T if weighted else 1)
    assert found.loss_T.detach().numpy() == pytest.approx((factor_T * new_T).numpy())
    found.loss_T.sum().backward()
    assert tokens.logprobs_T.grad.numpy() == pytest.approx(factor_T.numpy())
    assert found.reports.keys() == {"log_ratio"}
    expected_T = (new_T - tokens.old_T).numpy()
    assert found.reports["log_ratio"].detach().numpy() == pytest.approx(expected_T)


@pytest.mark.parametrize("name", [*LOSSES, "reinforce"])
def test_log_ratios_are_clamped_as_in_verl(name: str):
    """Only the log-ratio of a whole sample has a smaller bound, 10."""
    made = make_tokens(12)
    function = reinforce if name == "reinforce" else LOSSES[name].function
    for distance, clamped in ((19.0, 19.0), (25.0, 20.0), (-19.0, -19.0), (-25.0, -20.0)):
        new_T, A_T = torch.full_like(made.old_T, -30.0), torch.full_like(made.old_T, -1.0)
        found = function(
            replace(made, logprobs_T=new_T, old_T=new_T - distance, advantages_T=A_T), ACTOR
        )
        assert set(found.reports["log_ratio"].tolist()) == {clamped}
        if name in ("gspo", "geo_mean") and distance > 0:
            assert counted(found.loss_T, made) == pytest.approx(np.exp(10.0))


@pytest.mark.parametrize("name", [*LOSSES, "reinforce"])
def test_reports_mark_the_tokens_that_are_clipped(name: str):
    """A token is clipped if the clip changes its loss; in CISPO and GMPO, if its ratio is out of
    range. GMPO distinguishes clipped ratios with positive and negative advantages."""
    tokens = make_tokens(10, of_sample=False, spread=1.5)
    found = (reinforce if name == "reinforce" else LOSSES[name].function)(tokens, ACTOR)
    log_T, A_T = (tokens.logprobs_T - tokens.old_T).detach(), tokens.advantages_T
    if name == "gspo":
        log_T = tokens.samples.spread(tokens.samples.mean(log_T))
    r_T = log_T.exp()
    limited_T = r_T.clamp(0.8, 1.3)
    cut_T, zero_T = -A_T * limited_T > -A_T * r_T, found.loss_T == 0
    beyond_T = (log_T < -0.2) | (log_T > 0.3)
    expected = {
        "vanilla": (cut_T, (A_T < 0) & ((-A_T * r_T).maximum(-A_T * limited_T) > -A_T * 3)),
        "gspo": (cut_T,),
        "cispo": (r_T != limited_T,),
        "geo_mean": (beyond_T & (A_T > 0), beyond_T & (A_T < 0)),
        "dppo_tv": (zero_T, (r_T > 3) & ~zero_T),
        "dppo_kl": (zero_T, (r_T > 3) & ~zero_T),
        "clip_cov": (tokens.chosen_T,),
        "kl_cov": (tokens.chosen_T,),
    }.get(name, ())
    names = ("clipped", "dual_clipped")[: len(expected)]
    assert found.reports.keys() == {*names, "log_ratio"}
    for report, flags_T in zip(names, expected, strict=True):
        assert flags_T[tokens.mask_T].any()
        assert counted(found.reports[report], tokens).tolist() == counted(flags_T, tokens).tolist()


def test_gmpo_replaces_a_weight_of_0_with_a_small_number():
    made = make_tokens(15, weighted=True)
    zero_T = torch.where(torch.arange(len(made.old_T)) % 7 == 0, 0.0, made.weights_T)
    found, free = (
        LOSSES["geo_mean"].function(replace(made, weights_T=weights_T), ACTOR).loss_T
        for weights_T in (zero_T, None)
    )
    logs_T = torch.where(zero_T == 0, np.log(1e-10), zero_T.log())
    expected_T = free * made.samples.spread(made.samples.mean(logs_T)).exp()
    assert counted(found, made) == pytest.approx(counted(expected_T, made), rel=1e-6)
