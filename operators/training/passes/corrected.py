"""Corrections of the mismatch on a rank: once per step, or, bypassing old log-probs, per update.

Letters: X samples, T response tokens, sample after sample.
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
from pipeline.rl.corrections.forms import Correction
from pipeline.rl.corrections.tally import Tally

Masks = Mapping[str, npt.NDArray[np.bool_]]


def correct_step(rank: Rank, data: StepData, old: LogProbs, mask: Masks) -> Corrected:
    """Correct this data-parallel rank's whole samples, [T]; those of the last stage call together.

    `old` are the trainer's log-probs and `mask` the tokens that count, in one order of samples.
    """
    correction = rank.config.algorithm.rollout_correction.correction
    corrected = _correct(correction, data, old, mask)
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
    """Correct a micro-batch by the log-probs of its update, of all context-parallel ranks' tokens.

    It waits for the device, as the pass that bypass_mode saves would have.
    """
    current = response.split(of_all_ranks(rank, response, logprobs_T.detach()).cpu().numpy())
    correction = rank.config.algorithm.rollout_correction.correction
    return _correct(correction, data, current, {id: mask[id] for id in response.ids})


def _correct(correction: Correction, data: StepData, trainer: LogProbs, mask: Masks) -> Corrected:
    ids = list(mask)
    sampled = Sampled(
        trainer_T=joined(np.float32, [trainer[id] for id in ids]),
        engine_T=joined(np.float32, [data.samples[id].logprobs_G for id in ids]),
        mask_T=joined(np.bool_, [mask[id] for id in ids]),
        lengths_X=np.array([len(mask[id]) for id in ids], np.int64),
    )
    return correct(correction, sampled)


def engine_logprobs(data: StepData, mask: Masks) -> LogProbs:
    """The engine's log-probs, 0 for tokens that do not count, as those may be unknown."""
    return {
        id: np.where(mask[id], data.samples[id].logprobs_G, 0).astype(np.float32) for id in mask
    }
