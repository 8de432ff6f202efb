"""What the updates compare with: old log-probs, reference, advantages, corrections, per token.

Made once per step, after the log-prob passes, for this data-parallel rank's whole samples. Letters:
N samples of the step, X samples of this rank, T their response tokens, sample after sample.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from operators.training.batches.micro_batch import ResponseTokens, counting
from operators.training.batches.step_data import (
    StepData,
    group_codes,
    trained_rewards,
    without_loss,
)
from operators.training.passes.corrected import correct_batch, correct_step, engine_logprobs
from operators.training.passes.flat import BySample, joined, split
from operators.training.passes.logprob_pass import LogProbs
from operators.training.rank import Rank
from pipeline.rl.corrections.tally import Tally
from pipeline.rl.estimator_table import ESTIMATORS
from pipeline.rl.estimators.types import Floats, Ranks, Rollouts


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


def compare(
    rank: Rank, data: StepData, old: LogProbs | None, reference: LogProbs | None
) -> Compared:
    """Make corrections and advantages of a step. The data-parallel ranks call together.

    `old` are the trainer's log-probs; None: the engine's take their place, and corrections are made
    in each update.
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
    rollouts = _rollouts(rank, data, lengths_X, mask_T)
    estimator = ESTIMATORS[rank.config.algorithm.adv_estimator]
    estimate = estimator(rollouts, rank.config.algorithm)

    def by_sample(values_T: npt.NDArray[Any], dtype: type) -> BySample:
        return split(ids, lengths_X.tolist(), values_T.astype(dtype))

    weights_T = None if corrected is None else corrected.weights_T
    return Compared(
        old=old,
        reference=reference,
        advantages=by_sample(estimate.advantages_T, np.float32),
        mask=by_sample(mask_T, np.bool_),
        weights=None if weights_T is None else by_sample(weights_T, np.float32),
        tally=None if corrected is None else corrected.tally,
    )


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


def _rollouts(
    rank: Rank, data: StepData, lengths_X: npt.NDArray[np.int64], mask_T: npt.NDArray[np.bool_]
) -> Rollouts:
    rewards_N = trained_rewards(data.columns)
    rows_X = np.array(list(data.ids), np.int64)
    scores_T = np.zeros(int(lengths_X.sum()))
    # A sample without a response token has no place for its reward, and nothing to train.
    some_X = lengths_X > 0
    scores_T[np.cumsum(lengths_X)[some_X] - 1] = np.nan_to_num(rewards_N[rows_X][some_X])
    return Rollouts(
        rewards_N=rewards_N,
        groups_N=group_codes(data.columns),
        rows_X=rows_X,
        lengths_X=lengths_X,
        mask_T=mask_T,
        scores_T=scores_T,
        ranks=data_parallel_ranks(rank),
    )


@dataclass(frozen=True)
class _DataParallelRanks:
    group: dist.ProcessGroup
    device: torch.device

    def total(self, values: Floats) -> Floats:
        summed = torch.from_numpy(np.ascontiguousarray(values, np.float64)).to(self.device)
        dist.all_reduce(summed, group=self.group)
        total: Floats = summed.cpu().numpy()
        return total


def data_parallel_ranks(rank: Rank) -> Ranks:
    """The ranks that share a step's samples."""
    return _DataParallelRanks(rank.position.samples_group, next(rank.chunks[0].parameters()).device)
