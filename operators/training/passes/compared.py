"""What the updates compare with: old log-probs, reference, advantages, corrections, per token.

Made once per step, after the log-prob passes, for this data-parallel rank's whole samples. Letters:
N samples of the step, X samples of this rank, T their response tokens, sample after sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from operators.training.batches.micro_batch import counting
from operators.training.batches.step_data import (
    StepData,
    group_codes,
    trained_rewards,
    without_loss,
)
from operators.training.passes.logprob_pass import LogProbs
from operators.training.rank import Rank
from pipeline.rl.corrections import correct
from pipeline.rl.estimator_table import ESTIMATORS
from pipeline.rl.estimators.types import Floats, Ranks, Rollouts

BySample = Mapping[str, npt.NDArray[Any]]
"""Values of response tokens, [G] by sample id."""


@dataclass(frozen=True)
class Compared:
    """Values by sample; all empty off the last pipeline stage, which alone has a loss."""

    old: LogProbs
    """The trainer's log-probs at the step's start, float32."""
    reference: LogProbs | None
    """Float32; None: no reference model."""
    advantages: BySample = field(default_factory=dict)
    """Float32."""
    mask: BySample = field(default_factory=dict)
    """Bool: whether a token counts."""
    weights: BySample | None = None
    """Importance weights, float32; None: none are configured."""


def compare(rank: Rank, data: StepData, old: LogProbs, reference: LogProbs | None) -> Compared:
    """Make advantages and corrections of a step. The data-parallel ranks call together."""
    if not rank.position.last_stage:
        return Compared(old, reference)
    ids = list(data.ids.values())
    samples = [data.samples[id] for id in ids]
    ignored = without_loss(rank.config)
    mask_T = joined(np.bool_, [counting(s, data.untrained, ignored) for s in samples])
    corrected = correct(
        joined(np.float64, [old[id] for id in ids]),
        joined(np.float64, [sample.logprobs_G for sample in samples]),
        mask_T,
        rank.config.algorithm.rollout_correction,
    )
    lengths_X = np.array([len(sample.response_tokens_G) for sample in samples], np.int64)
    rollouts = _rollouts(rank, data, lengths_X, corrected.mask_T)
    estimator = ESTIMATORS[rank.config.algorithm.adv_estimator]
    estimate = estimator(rollouts, rank.config.algorithm)

    def by_sample(values_T: npt.NDArray[Any], dtype: type) -> BySample:
        return split(ids, lengths_X.tolist(), values_T.astype(dtype))

    weights_T = corrected.weights_T
    return Compared(
        old=old,
        reference=reference,
        advantages=by_sample(estimate.advantages_T, np.float32),
        mask=by_sample(corrected.mask_T, np.bool_),
        weights=None if weights_T is None else by_sample(weights_T, np.float32),
    )


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


def joined(dtype: type, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Put values of samples in a row."""
    values_T: npt.NDArray[Any] = np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)
    return values_T


def split(ids: Sequence[str], lengths: Sequence[int], values_T: npt.NDArray[Any]) -> BySample:
    """Cut values of samples in a row, by sample."""
    ends = np.cumsum(np.array(lengths, np.int64))[:-1]
    return dict(zip(ids, np.split(values_T, ends), strict=True)) if ids else {}
