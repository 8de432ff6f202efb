"""Totals for a mini-batch over all ranks, computed before any of its micro-batches is laid out."""

import torch

from operators.training.batches.layout import MiniBatch
from operators.training.batches.step_data import StepData
from operators.training.passes.compared import Compared
from operators.training.rank import Rank
from pipeline.rl.losses.aggregate import Totals


def totals_of(
    rank: Rank, data: StepData, mini_batch: MiniBatch, compared: Compared
) -> tuple[Totals, int]:
    """Count the tokens, samples and positions of a mini-batch.

    All ranks must call this collective. The routes of the mini-batch may still be arriving.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        mini_batch: The mini-batch.
        compared: The loss mask.

    Returns:
        The numbers of tokens and samples that the loss includes, and the number of positions in all
        samples, including prompts. They are the same on all ranks.
    """
    own = [0, 0, 0]
    if rank.position.speaks_for_samples:
        for row in mini_batch.rows(rank.position.dp_rank).tolist():
            id = data.ids[row]
            tokens = int(compared.mask[id].sum())
            own[0] += tokens
            own[1] += tokens > 0
            own[2] += len(data.samples[id].tokens_S) - 1
    sums = torch.tensor(own, device=rank.device)
    torch.distributed.all_reduce(sums)
    tokens, samples, positions = sums.tolist()
    return Totals(tokens, samples), positions
