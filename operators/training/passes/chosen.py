"""Chooses, from a mini-batch, the tokens that a loss drops (Clip-Cov) or penalises (KL-Cov).

The choice is made before the update of the mini-batch.

Dimensions: T response tokens in the mini-batch on this data-parallel rank, sample by sample; G
response tokens in a sample.
"""

from collections.abc import Sequence

import numpy as np

from operators.training.batches.hashing import hashes, salt
from operators.training.batches.layout import MiniBatch, Rows
from operators.training.batches.step_data import StepData
from operators.training.passes.advantages import data_parallel_ranks
from operators.training.passes.compared import Compared
from operators.training.passes.flat import BySample, joined, split
from operators.training.passes.logprob_pass import LogProbs
from operators.training.rank import Rank
from pipeline.rl.loss_table import ChoiceFunction
from pipeline.rl.losses.choice import Choice, Keys


def chosen_tokens(
    rank: Rank,
    data: StepData,
    mini_batch: MiniBatch,
    compared: Compared,
    choose: ChoiceFunction,
    current: LogProbs,
) -> BySample:
    """Return the chosen tokens of a mini-batch. All data-parallel ranks must call this collective.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        mini_batch: The mini-batch.
        compared: Old log-probs, advantages and the loss mask.
        choose: The loss's function that chooses tokens.
        current: Log-probs for the mini-batch's samples before its update.

    Returns:
        Whether each response token is chosen, bool [G], keyed by sample id.
    """
    rows = mini_batch.rows(rank.position.dp_rank)
    ids = [data.ids[row] for row in rows.tolist()]
    lengths = [len(current[id]) for id in ids]
    choice = Choice(
        logprobs_T=joined(np.float64, [current[id] for id in ids]),
        old_T=joined(np.float64, [compared.old[id] for id in ids]),
        advantages_T=joined(np.float64, [compared.advantages[id] for id in ids]),
        mask_T=joined(np.bool_, [compared.mask[id] for id in ids]),
        drawn_T=_drawn(rank, data, mini_batch.epoch, rows, lengths),
        ranks=data_parallel_ranks(rank),
    )
    chosen_T = choose(choice, rank.config.actor_rollout_ref.actor)
    return split(ids, lengths, chosen_T)


def _drawn(rank: Rank, data: StepData, epoch: int, rows: Rows, lengths: Sequence[int]) -> Keys:
    """Return a pseudo-random number per token, derived from the sample's row and the token's index
    in the response."""
    of_epoch = salt(rank.config.trainer.seed, data.step, epoch, "tokens")
    places = [row << 32 | np.arange(G) for row, G in zip(rows.tolist(), lengths, strict=True)]
    return hashes(joined(np.int64, places), of_epoch)
