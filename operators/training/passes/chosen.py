"""The tokens of a mini-batch that a loss treats apart (Clip-Cov, KL-Cov), before it is trained.

Letters: T response tokens of the mini-batch on this data-parallel rank, sample after sample.
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
    """Whether a token is chosen, bool [G] by sample. The data-parallel ranks call together.

    `current` are log-probs by the weights that the mini-batch is about to change.
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
    """A random number of each token, by its sample's row in the manifest and its place there."""
    of_epoch = salt(rank.config.trainer.seed, data.step, epoch, "tokens")
    places = [row << 32 | np.arange(G) for row, G in zip(rows.tolist(), lengths, strict=True)]
    return hashes(joined(np.int64, places), of_epoch)
