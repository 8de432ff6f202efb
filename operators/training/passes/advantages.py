"""Computes a step's advantages: prepares an estimator's inputs on a rank, and checks its result.

The ranks of the last pipeline stage compute the advantages, after the log-prob passes.

Dimensions: N samples in the step, X samples on this rank, T response tokens in this rank's samples,
concatenated sample by sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from operators.training.batches.step_data import StepData, group_baselines
from operators.training.errors import UpdateError
from operators.training.rank import Rank
from pipeline.rl.custom import from_sigterm, shown
from pipeline.rl.estimator_table import ESTIMATORS, needs_baseline
from pipeline.rl.estimators.types import Estimate, EstimatorFunction, Floats, Ranks, Rollouts
from pipeline.rl.kl import StepKl, kl_estimate, step_kl

_ESTIMATOR = "algorithm.adv_estimator"


@dataclass(frozen=True)
class Tokens:
    """The response tokens of this rank's samples, before advantages are computed."""

    ids: Sequence[str]
    """Sample ids."""
    lengths_X: npt.NDArray[np.int64]
    """Number of response tokens in each sample."""
    mask_T: npt.NDArray[np.bool_]
    """Whether each token is included in the loss."""
    old_T: Floats
    """The trainer's log-probs at the start of the step, or the engine's (bypass_mode)."""
    reference_T: Floats | None
    """The reference model's log-probs; None if there is no reference model."""
    values_T: Floats | None
    """The critic's values; None if there is no critic."""


def estimate_advantages(
    rank: Rank, data: StepData, tokens: Tokens, kl_coef: float
) -> tuple[Estimate, StepKl | None]:
    """Compute the advantages for a step. All data-parallel ranks must call this collective.

    Args:
        rank: This training rank: settings and users' functions.
        data: This rank's data for the step.
        tokens: The response tokens of this rank's samples.
        kl_coef: Coefficient of the KL to the reference. The KL times this coefficient is subtracted
            from the scores if algorithm.use_kl_in_reward is set.

    Returns:
        Advantages and returns, float64 [T], 0 for tokens that the loss excludes; and the step's KL
        to the reference, or None if the KL is not subtracted.

    Raises:
        UpdateError: A log-prob, advantage or return is not finite; a user's function raised an
            error or returned a value of the wrong type or shape; or greedy samples are missing for
            ReMax.
    """
    settings = rank.config.algorithm
    rollouts = _rollouts(rank, data, tokens)
    kl = None
    if settings.use_kl_in_reward:
        kl_T = _kl(rank, tokens)
        _refuse(data.step, tokens, kl_T, "the KL to the reference (algorithm.use_kl_in_reward)")
        kl = step_kl(rollouts, kl_T)
        rollouts.scores_T[:] -= kl_coef * kl_T
    function = rank.functions.get(_ESTIMATOR)
    if function is None and needs_baseline(settings.adv_estimator) and rollouts.baseline_N is None:
        raise UpdateError(
            f"step {data.step}: {_ESTIMATOR}={settings.adv_estimator} requires a greedy sample for "
            "each prompt, but the step has no greedy samples, because it was sampled for a "
            "different estimator; start a new run with that estimator, such as rloo"
        )
    if function is None:
        estimate = ESTIMATORS[settings.adv_estimator].function(rollouts, settings)
    else:
        estimate = _of_user(rank, data.step, tokens, function, rollouts)
    by = f"by {_ESTIMATOR}={settings.adv_estimator}"
    advantages_T = np.where(tokens.mask_T, estimate.advantages_T, 0.0)
    _refuse(data.step, tokens, advantages_T, f"the advantage {by}")
    returns_T = estimate.returns_T
    if returns_T is not None:
        returns_T = np.where(tokens.mask_T, returns_T, 0.0)
        _refuse(data.step, tokens, returns_T, f"the return {by}")
    return Estimate(advantages_T, returns_T), kl


def _rollouts(rank: Rank, data: StepData, tokens: Tokens) -> Rollouts:
    rows_X = np.array(list(data.ids), np.int64)
    scores_T = np.zeros(len(tokens.mask_T))
    # A sample without response tokens has no loss, and no token to carry its reward.
    some_X = tokens.lengths_X > 0
    ends_X = np.cumsum(tokens.lengths_X)[some_X] - 1
    scores_T[ends_X] = np.nan_to_num(data.rewards_N[rows_X][some_X])
    return Rollouts(
        rewards_N=data.rewards_N,
        groups_N=data.groups_N,
        rows_X=rows_X,
        lengths_X=tokens.lengths_X,
        mask_T=tokens.mask_T,
        scores_T=scores_T,
        ranks=data_parallel_ranks(rank),
        baseline_N=group_baselines(data.columns, data.groups_N),
        values_T=tokens.values_T,
    )


def _kl(rank: Rank, tokens: Tokens) -> Floats:
    """Return KL(policy || reference) at each token; 0 for tokens that the loss excludes."""
    if tokens.reference_T is None:
        raise ValueError("algorithm.use_kl_in_reward requires the reference's log-probs")
    kl_T: Floats = kl_estimate(
        torch.from_numpy(tokens.old_T),
        torch.from_numpy(tokens.reference_T),
        rank.config.algorithm.kl_penalty,
    ).numpy()
    return np.where(tokens.mask_T, kl_T, 0.0)


def _of_user(
    rank: Rank, step: int, tokens: Tokens, function: EstimatorFunction, rollouts: Rollouts
) -> Estimate:
    """Call a user's estimator, and check its result. Raises UpdateError."""
    name = rank.config.algorithm.adv_estimator
    where = f"step {step}: {_ESTIMATOR}={name}"
    many = f"{len(tokens.mask_T)} tokens of {len(tokens.ids)} samples"
    if tokens.ids:
        many += f" ({tokens.ids[0]} to {tokens.ids[-1]})"
    try:
        made = function(rollouts, rank.config.algorithm)
    except (Exception, SystemExit) as error:  # users' code may raise anything
        if from_sigterm(error):
            raise
        raise UpdateError(
            f"{where} raised {type(error).__name__}: {shown(error, str)}, for {many}; the step was "
            "not trained. Fix the function and start the run again"
        ) from error
    if not isinstance(made, Estimate):
        raise UpdateError(
            f"{where} returned {type(made).__name__}, expected an Estimate "
            "(pipeline.rl.estimators.types); fix the function"
        )
    returns_T = None
    if made.returns_T is not None:
        returns_T = _numbers(made.returns_T, tokens, f"{where} returned returns_T of", many)
    advantages_T = _numbers(made.advantages_T, tokens, f"{where} returned advantages_T of", many)
    return Estimate(advantages_T, returns_T)


def _numbers(values: npt.ArrayLike, tokens: Tokens, where: str, many: str) -> Floats:
    """Convert a user's values to float64 [T]. Raises UpdateError unless each token has a number."""
    expected = f"expected a number for each of this rank's {many}"
    try:
        array = np.asarray(values)
    except Exception as error:  # lists of lists, and objects of users' code
        raise UpdateError(
            f"{where} type {type(values).__name__}, {expected}, but numpy cannot convert it: "
            f"{shown(error, str)}; fix the function"
        ) from error
    if array.shape == tokens.mask_T.shape and array.dtype.kind in "fiu":
        return array.astype(np.float64)
    raise UpdateError(
        f"{where} shape {array.shape} and type {array.dtype}, {expected}; fix the function"
    )


def _refuse(step: int, tokens: Tokens, values_T: Floats, what: str) -> None:
    """Raise UpdateError for the first value that is not finite."""
    wrong = np.flatnonzero(~np.isfinite(values_T))
    if not len(wrong):
        return
    sample = int(np.searchsorted(np.cumsum(tokens.lengths_X), wrong[0], side="right"))
    token = int(wrong[0] - tokens.lengths_X[:sample].sum())
    raise UpdateError(
        f"step {step}, sample {tokens.ids[sample]}, response token {token}: {what} is "
        f"{values_T[wrong[0]]}, expected a finite number ({len(wrong)} of this rank's "
        f"{len(values_T)} tokens have no finite value); the step was not trained"
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
    """Return the data-parallel ranks, which share the samples of a step."""
    return _DataParallelRanks(rank.position.samples_group, next(rank.chunks[0].parameters()).device)
