"""A user's loss: the tokens and settings that it receives, and the results that are accepted."""

import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from operators.training.errors import UpdateError
from operators.training.passes.custom_loss import OWN_REPORTS, checked
from operators.training.passes.objective import Targets, loss_and_report, objective_of
from operators.training.worker import exit_on_sigterm
from pipeline.rl.losses.aggregate import Totals
from pipeline.rl.losses.types import PolicyLoss
from tests.integration.training_replay.sealed import config_of
from tests.unit.rl.losses.batches import ACTOR, LENGTHS, make_tokens

IDS = tuple(f"000007/{i}/0" for i in range(len(LENGTHS)))
RESPONSE: Any = SimpleNamespace(
    ids=IDS, sample_T=np.repeat(np.arange(len(LENGTHS)), LENGTHS), lengths=LENGTHS
)
WHERE = "step 7: actor_rollout_ref.actor.policy_loss.loss_mode=mine.py:loss"


def failure(function: Any) -> str:
    with pytest.raises(UpdateError) as caught:
        checked(function, WHERE, RESPONSE)(make_tokens(0), ACTOR)
    assert str(caught.value).startswith(WHERE)
    return str(caught.value).removeprefix(WHERE)


def test_the_returned_loss_and_reports_are_used():
    def mine(tokens, settings):
        assert settings.clip_high == 0.3
        return PolicyLoss(-tokens.logprobs_T * tokens.advantages_T, {"high": tokens.old_T > -1})

    tokens = make_tokens(0)
    made = checked(mine, WHERE, RESPONSE)(tokens, ACTOR)
    assert made.reports.keys() == {"high", "log_ratio"}
    assert torch.equal(made.reports["log_ratio"], tokens.logprobs_T - tokens.old_T)
    assert torch.equal(made.loss_T, -tokens.logprobs_T * tokens.advantages_T)


def test_an_exception_names_step_function_and_samples():
    text = failure(lambda tokens, settings: {}["gain"])
    assert text.startswith(" raised KeyError: 'gain', for 61 tokens of 6 samples ")
    assert f"({IDS[0]} to {IDS[-1]})" in text


def test_a_signal_during_the_loss_ends_the_rank():
    def stopped(tokens, settings):
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    exit_on_sigterm()
    try:
        with pytest.raises(SystemExit) as caught:
            checked(stopped, WHERE, RESPONSE)(make_tokens(0), ACTOR)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 143


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda t: t.logprobs_T, " returned Tensor"),
        (lambda t: PolicyLoss(t.logprobs_T.mean(), {}), " returned loss_T of shape ()"),
        (lambda t: PolicyLoss(0.5, {}), " returned loss_T of type float"),
        (lambda t: PolicyLoss(t.logprobs_T, {"x": t.old_T[1:]}), " returned x of shape (60,)"),
        (lambda t: PolicyLoss(t.logprobs_T, None), " returned reports None"),
        (lambda t: PolicyLoss(t.old_T, {}), " returned a loss without a gradient"),
        (lambda t: PolicyLoss(t.logprobs_T * 1j, {}), " returned loss_T of complex numbers"),
        (lambda t: PolicyLoss(t.logprobs_T, {"kl": t.old_T}), " returned reports with the reserve"),
    ],
)
def test_results_without_a_loss_per_token_are_refused(made: Any, text: str):
    assert failure(lambda tokens, settings: made(tokens)).startswith(text)


def test_a_loss_or_report_that_is_not_finite_names_the_sample():
    text = failure(lambda t, settings: PolicyLoss(t.logprobs_T, {"gain": t.old_T / 0}))
    assert text.startswith(f", sample {IDS[0]}: gain is -inf")
    tokens = make_tokens(0)
    token = int(torch.nonzero(tokens.mask_T & (tokens.samples.sample_T == 4))[0])

    def mine(tokens, settings):
        wrong_T = torch.zeros_like(tokens.old_T)
        wrong_T[token] = float("nan")
        return PolicyLoss(tokens.logprobs_T + wrong_T, {})

    assert failure(mine).startswith(f", sample {IDS[4]}: loss is nan")


def test_tokens_that_do_not_count_may_have_any_loss():
    def mine(tokens, settings):
        return PolicyLoss(torch.where(tokens.mask_T, tokens.logprobs_T, float("nan")), {})

    checked(mine, WHERE, RESPONSE)(make_tokens(0), ACTOR)


def test_the_reserved_names_are_those_of_the_reports_of_every_loss():
    """loss_and_report itself adds these reports."""
    tokens = make_tokens(0)
    config = config_of(use_kl_loss=True)
    objective = objective_of(config, lambda tokens, _: PolicyLoss(tokens.logprobs_T, {}))
    targets = Targets(
        tokens.mask_T, tokens.advantages_T, tokens.old_T, tokens.old_T, None,
        tokens.samples, None,
    )  # fmt: skip
    made = loss_and_report(objective, targets, Totals(1, 1), tokens.logprobs_T, tokens.entropy_T)
    assert made[2].keys() == OWN_REPORTS
