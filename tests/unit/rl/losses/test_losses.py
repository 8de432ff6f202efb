"""Each loss equals its paper's formula, written for one sample at a time in double precision, and
has that formula's gradient."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.rl.loss_table import LOSSES
from tests.unit.rl.losses.batches import ACTOR, make_tokens, sequences
from tests.unit.rl.losses.plain import PLAIN, Sequence

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
def test_a_loss_is_its_formula(name: str, of_sample: bool, weighted: bool, seed: int):
    tokens = make_tokens(seed, of_sample=of_sample, weighted=weighted)
    found = LOSSES[name].function(tokens, ACTOR)
    expected = [PLAIN[name](sequence) for sequence in sequences(tokens).values()]
    assert counted(found.loss_T, tokens) == pytest.approx(np.concatenate(expected), rel=1e-9)
    assert found.loss_T.isfinite().all()


DIFFERENTIABLE = ("vanilla", "gpg", "sapo", "geo_mean", "gspo")
"""The others stop gradients by definition."""


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_gradient_is_that_of_the_formula(name: str):
    """By central differences of the mean over samples of the mean over tokens, which is GSPO's and
    GMPO's objective. Tokens that do not count have gradient 0."""
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
    """The loss is a number times log(new): its gradient is that number."""
    tokens = make_tokens(4, of_sample=False)
    found = LOSSES[name].function(tokens, ACTOR).loss_T
    found.sum().backward()
    expected_T = (found / tokens.logprobs_T).detach()
    assert tokens.logprobs_T.grad.numpy() == pytest.approx(expected_T.numpy(), rel=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_the_policy_gradient(name: str):
    """At new = old, tokens averaged by sample: -A / tokens of the sample, for every loss without a
    token held back."""
    made = make_tokens(5)
    none_T = torch.zeros_like(made.mask_T)
    tokens = replace(made, old_T=made.logprobs_T.detach().clone(), chosen_T=none_T)
    loss_T = LOSSES[name].function(tokens, ACTOR).loss_T
    tokens.samples.mean(loss_T).sum().backward()
    expected_T = -tokens.advantages_T / tokens.samples.spread(tokens.samples.tokens_S.clamp(min=1))
    expected_T = torch.where(tokens.mask_T, expected_T, 0)
    assert tokens.logprobs_T.grad.numpy() == pytest.approx(expected_T.numpy(), rel=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_what_does_not_count_changes_nothing(name: str):
    """Other values of masked tokens leave losses and gradients of the others as they are."""
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
def test_every_loss_reports_the_log_ratio_and_its_numbers_by_token(name: str):
    tokens = make_tokens(7)
    reports = LOSSES[name].function(tokens, ACTOR).reports
    assert {value_T.shape for value_T in reports.values()} == {tokens.mask_T.shape}
    expected_T = (tokens.logprobs_T - tokens.old_T).detach()
    assert reports["log_ratio"].detach().numpy() == pytest.approx(expected_T.numpy())


def test_far_away_log_probs_make_no_infinity():
    """Log-ratios of +-400 are clamped by every loss, in float32."""
    made = make_tokens(8)
    for name, loss in LOSSES.items():
        for distance in (-400.0, 400.0):
            new_T = torch.full_like(made.old_T, -450.0, dtype=torch.float32).requires_grad_()
            tokens = replace(made, logprobs_T=new_T, old_T=new_T.detach() - distance)
            loss_T = loss.function(tokens, ACTOR).loss_T
            loss_T.sum().backward()
            assert loss_T.isfinite().all(), name
            assert new_T.grad.isfinite().all(), name


def test_clip_cov_drops_the_chosen_and_kl_cov_penalises_them():
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
