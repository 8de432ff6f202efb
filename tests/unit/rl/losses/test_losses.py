"""Each loss and its gradient equal the paper's formula for one sample in double precision."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.reinforce import reinforce
from tests.unit.rl.losses.batches import ACTOR, make_tokens, sequences
from tests.unit.rl.losses.plain import PLAIN, Sequence, clips

BY_SAMPLE = ("gspo", "geo_mean")
CASES = [
    (name, of_sample, weighted)
    for name in PLAIN
    for of_sample in ((True,) if name == "geo_mean" else (True, False))
    for weighted in (False, True)
]


def counted(loss_T: torch.Tensor, tokens) -> np.ndarray:
    return loss_T.detach()[tokens.mask_T].numpy()


@pytest.mark.parametrize(("name", "of_sample", "weighted"), CASES)
@pytest.mark.parametrize("seed", range(5))
def test_a_loss_equals_its_formula(name: str, of_sample: bool, weighted: bool, seed: int):
    tokens = make_tokens(seed, of_sample=of_sample, weighted=weighted)
    found = LOSSES[name].function(tokens, ACTOR)
    expected = [PLAIN[name](sequence) for sequence in sequences(tokens).values()]
    assert counted(found.loss_T, tokens) == pytest.approx(np.concatenate(expected), rel=1e-9)
    assert found.loss_T.isfinite().all()


DIFFERENTIABLE = ("vanilla", "gpg", "sapo", "geo_mean", "gspo")
"""Losses without stopped gradients; the definitions of all other losses stop gradients."""


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_gradient_equals_the_formulas(name: str):
    """The formula's gradient is computed by central differences.

    The objective is the one in GSPO and GMPO: a mean over the tokens of each sample, and then a
    mean over the samples. Tokens excluded from the loss have gradient 0.
    """
    tokens = make_tokens(3)
    of_sample = sequences(tokens)
    loss_T = torch.where(tokens.mask_T, LOSSES[name].function(tokens, ACTOR).loss_T, 0)
    tokens.samples.mean(loss_T).sum().backward()
    expected_T = np.zeros(len(loss_T))
    for sample, sequence in of_sample.items():
        where_T = ((tokens.samples.sample_T == sample) & tokens.mask_T).nonzero()[:, 0]
        expected_T[where_T] = differences(name, sequence)
    assert tokens.logprobs_T.grad.numpy() == pytest.approx(expected_T, rel=1e-5, abs=1e-9)
    assert np.abs(expected_T).max() > 0.01


def differences(name: str, sequence: Sequence, step: float = 1e-6) -> np.ndarray:
    found = np.zeros(len(sequence.new))
    for i in range(len(found)):
        moved = []
        for sign in (1, -1):
            new = sequence.new.copy()
            new[i] += sign * step
            moved.append(PLAIN[name](replace(sequence, new=new)).mean())
        found[i] = (moved[0] - moved[1]) / (2 * step)
    return found


@pytest.mark.parametrize(
    ("name", "factor"), [("cispo", True), ("dppo_tv", True), ("dppo_kl", True)]
)
def test_a_stopped_factor_has_no_gradient(name: str, factor: bool):
    """The loss is a constant times log(new), so its gradient is that constant."""
    tokens = make_tokens(4, of_sample=False)
    found = LOSSES[name].function(tokens, ACTOR).loss_T
    found.sum().backward()
    expected_T = (found / tokens.logprobs_T).detach()
    assert tokens.logprobs_T.grad.numpy() == pytest.approx(expected_T.numpy(), rel=1e-9)


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


def test_clip_cov_drops_chosen_tokens_and_kl_cov_penalises_them():
    tokens = make_tokens(9, of_sample=False)
    new, old, A = (
        x.detach().numpy() for x in (tokens.logprobs_T, tokens.old_T, tokens.advantages_T)
    )
    chosen, r = tokens.chosen_T.numpy(), np.exp(new - old)
    clipped = np.maximum(-A * r, -A * np.clip(r, 0.8, 1.3))
    found = LOSSES["clip_cov"].function(tokens, ACTOR)
    assert found.loss_T.detach().numpy() == pytest.approx(np.where(chosen, 0, clipped))
    assert found.reports["clipped"].tolist() == chosen.tolist()
    found = LOSSES["kl_cov"].function(tokens, ACTOR)
    expected = -A * r + np.where(chosen, 0.1 * np.abs(new - old), 0)
    assert found.loss_T.detach().numpy() == pytest.approx(expected)
    found.loss_T.sum().backward()
    assert tokens.logprobs_T.grad.numpy() == pytest.approx(
        -A * r + np.where(chosen, 0.1 * np.sign(new - old), 0)
    )


@pytest.mark.parametrize("name", PLAIN)
def test_reports_mark_the_tokens_that_are_clipped(name: str):
    """If a loss lacks a report, its formula clips no token."""
    tokens = make_tokens(10, of_sample=False, spread=1.5)
    reports = LOSSES[name].function(tokens, ACTOR).reports
    flags = [clips(name, sequence) for sequence in sequences(tokens).values()]
    for place, report in enumerate(("clipped", "dual_clipped")):
        expected = np.concatenate([one[place] for one in flags])
        assert expected.any() == (report in reports), report
        found_T = reports.get(report, torch.zeros_like(tokens.mask_T))
        assert found_T[tokens.mask_T].tolist() == expected.tolist(), report


def test_gmpo_clips_no_token_with_an_advantage_of_0():
    made = make_tokens(14, spread=1.5)
    reports = (
        LOSSES["geo_mean"]
        .function(replace(made, advantages_T=torch.zeros_like(made.old_T)), ACTOR)
        .reports
    )
    assert not reports["clipped"].any()
    assert not reports["dual_clipped"].any()


def test_gmpo_replaces_a_weight_of_0_with_a_small_number():
    made = make_tokens(15, weighted=True)
    weights_T = torch.where(torch.arange(len(made.old_T)) % 7 == 0, 0.0, made.weights_T)
    found = LOSSES["geo_mean"].function(replace(made, weights_T=weights_T), ACTOR).loss_T
    same = replace(made, weights_T=weights_T.clamp(min=1e-10))
    expected = np.concatenate([PLAIN["geo_mean"](one) for one in sequences(same).values()])
    assert counted(found, made) == pytest.approx(expected, rel=1e-6)


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
