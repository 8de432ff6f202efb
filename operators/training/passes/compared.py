"""Per-token inputs of the updates: old log-probs, reference, advantages and corrections.

The inputs are computed once per step, after the log-prob passes. They cover entire samples of this
data-parallel rank, including the tokens of all its context-parallel ranks.

Dimensions: X samples on this rank, T response tokens in these samples, sample by sample; U response
tokens in a micro-batch; G response tokens in a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from operators.training.batches.micro_batch import ResponseTokens, counting
from operators.training.batches.step_data import StepData, without_loss
from operators.training.passes.advantages import Tokens, estimate_advantages
from operators.training.passes.corrected import (
    correct_batch,
    correct_samples,
    correct_step,
    engine_logprobs,
    known_logprobs,
)
from operators.training.passes.flat import BySample, joined, split
from operators.training.passes.logprob_pass import LogProbs
from operators.training.rank import Rank
from pipeline.rl.kl import StepKl
from pipeline.rl.moments import Tally


@dataclass(frozen=True)
class Compared:
    """Values of the response tokens, [G] each, keyed by sample id.

    All fields are empty except on the last pipeline stage, because only this stage has a loss.
    """

    old: LogProbs
    """The trainer's log-probs at the start of the step, or the engine's (bypass_mode); float32."""
    reference: LogProbs | None
    """The reference's log-probs, float32; None if there is no reference model."""
    advantages: BySample = field(default_factory=dict)
    """Advantages, float32."""
    mask: BySample = field(default_factory=dict)
    """Whether each token is included in the loss, bool."""
    weights: BySample | None = None
    """Importance weights, float32; None if not configured, or if each update computes them."""
    tally: Tally | None = None
    """Statistics on the corrections to this rank's samples; None if each update computes them."""
    kl: StepKl | None = None
    """The KL to the reference that was subtracted from the scores; None if not subtracted."""
    values: BySample | None = None
    """The critic's values at the start of the step, float32; None if there is no critic."""
    returns: BySample | None = None
    """Returns, the critic's targets, float32; None if the estimator does not compute them."""


def compare(
    rank: Rank,
    data: StepData,
    old: LogProbs | None,
    reference: LogProbs | None,
    kl_coef: float = 0.0,
    values: BySample | None = None,
) -> Compared:
    """Compute corrections and advantages for a step. All data-parallel ranks must call this.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        old: The trainer's log-probs; None uses the engine's, and computes corrections in
            each update (bypass_mode).
        reference: The reference's log-probs; None if there is no reference model.
        kl_coef: Coefficient of the KL to the reference in the reward.
        values: The critic's values; None if there is no critic.

    Raises:
        UpdateError: A value is not finite, or a user's estimator failed.
    """
    if not rank.position.last_stage:
        return Compared(old or {}, reference)
    ids = list(data.ids.values())
    ignored = without_loss(rank.config)
    mask = {id: counting(data.samples[id], data.untrained, ignored) for id in ids}
    mask_T = joined(np.bool_, [mask[id] for id in ids])
    corrected = None
    if old is None:
        old = engine_logprobs(data, mask)
    else:
        corrected = correct_step(rank, data, old, mask)
        mask_T = corrected.mask_T
        old = known_logprobs(old)
    lengths_X = np.array([len(mask[id]) for id in ids], np.int64)
    tokens = Tokens(
        ids=ids,
        lengths_X=lengths_X,
        mask_T=mask_T,
        old_T=joined(np.float64, [old[id] for id in ids]),
        reference_T=_of_all(reference, ids),
        values_T=_of_all(values, ids),
    )
    estimate, kl = estimate_advantages(rank, data, tokens, kl_coef)

    def by_sample(values_T: npt.NDArray[Any], dtype: type) -> BySample:
        return split(ids, lengths_X.tolist(), values_T.astype(dtype))

    weights_T = None if corrected is None else corrected.weights_T
    returns_T = estimate.returns_T
    return Compared(
        old=old,
        reference=reference,
        advantages=by_sample(estimate.advantages_T, np.float32),
        mask=by_sample(mask_T, np.bool_),
        weights=None if weights_T is None else by_sample(weights_T, np.float32),
        tally=None if corrected is None else corrected.tally,
        kl=kl,
        values=values,
        returns=None if returns_T is None else by_sample(returns_T, np.float32),
    )


def _of_all(values: BySample | None, ids: Sequence[str]) -> npt.NDArray[np.float64] | None:
    return None if values is None else joined(np.float64, [values[id] for id in ids])


def without_rejected(rank: Rank, data: StepData, current: LogProbs, compared: Compared) -> Compared:
    """Leave out the tokens that the update of a mini-batch will reject (bypass_mode).

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        current: Log-probs for the mini-batch's samples before its update.
        compared: The inputs of the step's updates.

    Returns:
        `compared` with a mask that covers only the mini-batch's samples.
    """
    kept_T = correct_samples(rank, data, current, compared.mask).mask_T
    lengths = [len(current[id]) for id in current]
    return replace(compared, mask=split(list(current), lengths, kept_T))


def corrected_batch(
    rank: Rank,
    data: StepData,
    response: ResponseTokens,
    logprobs_T: torch.Tensor,
    compared: Compared,
) -> tuple[Compared, Tally]:
    """Correct a micro-batch, using the log-probs that its own update computes (bypass_mode).

    All context-parallel ranks must call this collective.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        response: The response tokens of the micro-batch.
        logprobs_T: Log-probs of this rank's response tokens.
        compared: The inputs of the step's updates.

    Returns:
        `compared` with a mask and weights that cover only the micro-batch's samples; and the
        statistics of the corrections.
    """
    corrected = correct_batch(rank, data, response, logprobs_T, compared.mask)
    weights_U = corrected.weights_T
    of_batch = replace(
        compared,
        mask=response.split(corrected.mask_T),
        weights=None if weights_U is None else response.split(weights_U),
    )
    return of_batch, corrected.tally
