"""Corrects the mismatch between engine and trainer, per step or, in bypass_mode, per update.

Dimensions: X samples, T response tokens, concatenated sample by sample.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from operators.training.batches.micro_batch import ResponseTokens
from operators.training.batches.step_data import StepData
from operators.training.passes.flat import joined
from operators.training.passes.logprob_pass import LogProbs
from operators.training.passes.share import of_all_ranks
from operators.training.rank import Rank
from pipeline.rl.corrections.apply import Corrected, Sampled, correct, normalized
from pipeline.rl.moments import Tally

Masks = Mapping[str, npt.NDArray[np.bool_]]


def correct_step(rank: Rank, data: StepData, old: LogProbs, mask: Masks) -> Corrected:
    """Correct the samples of this data-parallel rank, each with all its tokens.

    All data-parallel ranks of the last pipeline stage must call this collective.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        old: The trainer's log-probs at the start of the step.
        mask: The loss mask; the result keeps its order of samples.

    Returns:
        Weights and mask, [T] each, and their statistics.
    """
    correction = rank.config.algorithm.rollout_correction.correction
    corrected = _correct(rank, data, old, mask)
    if not correction.normalized:
        return corrected
    group = rank.position.samples_group
    parts = [corrected.tally] * dist.get_world_size(group)
    dist.all_gather_object(parts, corrected.tally, group=group)
    return normalized(corrected, correction, sum(parts, start=Tally()))


def correct_batch(
    rank: Rank,
    data: StepData,
    response: ResponseTokens,
    logprobs_T: torch.Tensor,
    mask: Masks,
) -> Corrected:
    """Correct a micro-batch, using the log-probs that its own update computes (bypass_mode).

    All context-parallel ranks must call this collective. The call waits for the device; so would
    the log-prob pass that bypass_mode skips.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        response: The response tokens of the micro-batch.
        logprobs_T: Log-probs of this rank's response tokens.
        mask: The loss mask before the correction.

    Returns:
        Weights and mask for the tokens of all context-parallel ranks.
    """
    current = response.split(of_all_ranks(rank, response, logprobs_T.detach()).cpu().numpy())
    return correct_samples(rank, data, current, mask)


def correct_samples(rank: Rank, data: StepData, current: LogProbs, mask: Masks) -> Corrected:
    """Correct samples, using their log-probs under the weights before an update.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        current: The log-probs of the samples to correct.
        mask: The loss mask before the correction.

    Returns:
        Weights and mask, [T] each, in the order of `current`.
    """
    return _correct(rank, data, current, {id: mask[id] for id in current})


def _correct(rank: Rank, data: StepData, trainer: LogProbs, mask: Masks) -> Corrected:
    settings = rank.config.algorithm.rollout_correction
    ids = list(mask)
    sampled = Sampled(
        trainer_T=joined(np.float32, [trainer[id] for id in ids]),
        engine_T=joined(np.float32, [data.samples[id].logprobs_G for id in ids]),
        mask_T=joined(np.bool_, [mask[id] for id in ids]),
        lengths_X=np.array([len(mask[id]) for id in ids], np.int64),
    )
    return correct(settings.correction, sampled, needs_engine=settings.bypass_mode)


def engine_logprobs(data: StepData, mask: Masks) -> LogProbs:
    """Return the engine's log-probs; 0 for unknown ones and for tokens outside the mask."""
    return known_logprobs(
        {id: np.where(mask[id], data.samples[id].logprobs_G, np.float32(0)) for id in mask}
    )


def known_logprobs(logprobs: LogProbs) -> LogProbs:
    """Replace log-probs that are not finite by 0, because a NaN that a mask excludes from the loss
    would still make its gradient NaN."""
    return {
        id: np.nan_to_num(of_G, nan=0.0, posinf=0.0, neginf=0.0) for id, of_G in logprobs.items()
    }
