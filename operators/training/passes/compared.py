"""What the updates compare with: old log-probs, reference, advantages, corrections, per token.

Made once per step, after the log-prob passes, for this data-parallel rank's whole samples. Letters:
N samples of the step, X samples of this rank, T their response tokens, sample after sample.
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
from operators.training.passes.corrected import correct_batch, correct_step, engine_logprobs
from operators.training.passes.flat import BySample, joined, split
from operators.training.passes.logprob_pass import LogProbs
from operators.training.rank import Rank
from pipeline.rl.corrections.tally import Tally
from pipeline.rl.estimators.reward_kl import StepKl


@dataclass(frozen=True)
class Compared:
    """Values by sample; all empty off the last pipeline stage, which alone has a loss."""

    old: LogProbs
    """The trainer's log-probs at the step's start, or the engine's (bypass_mode); float32."""
    reference: LogProbs | None
    """Float32; None: no reference model."""
    advantages: BySample = field(default_factory=dict)
    """Float32."""
    mask: BySample = field(default_factory=dict)
    """Bool: whether a token counts."""
    weights: BySample | None = None
    """Importance weights, float32; None: there are none, or they are made in each update."""
    tally: Tally | None = None
    """What the corrections found, of this rank's samples; None: they are made in each update."""
    kl: StepKl | None = None
    """The KL to the reference that was taken from the scores; None: none was."""
    values: BySample | None = None
    """The critic's at the step's start, float32; None: there is no critic."""
    returns: BySample | None = None
    """What the critic learns to predict, float32; None: the estimator makes none."""


def compare(
    rank: Rank,
    data: StepData,
    old: LogProbs | None,
    reference: LogProbs | None,
    kl_coef: float = 0.0,
    values: BySample | None = None,
) -> Compared:
    """Make corrections and advantages of a step. The data-parallel ranks call together.

    `old` are the trainer's log-probs; None: the engine's take their place, and corrections are made
    in each update. `kl_coef` weighs the KL to the reference in the reward. Raises UpdateError.
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


def corrected_batch(
    rank: Rank,
    data: StepData,
    response: ResponseTokens,
    logprobs_T: torch.Tensor,
    compared: Compared,
) -> tuple[Compared, Tally]:
    """The part of `compared` that a micro-batch needs, corrected by its update's log-probs.

    The context-parallel ranks call together.
    """
    corrected = correct_batch(rank, data, response, logprobs_T, compared.mask)
    weights_U = corrected.weights_T
    of_batch = replace(
        compared,
        mask=response.split(corrected.mask_T),
        weights=None if weights_U is None else response.split(weights_U),
    )
    return of_batch, corrected.tally
