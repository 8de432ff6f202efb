"""What a mini-batch holds, over all ranks and micro-batches, before any of them is laid out."""

import torch

from operators.training.batches.layout import MiniBatch
from operators.training.batches.step_data import StepData
from operators.training.passes.compared import Compared
from operators.training.rank import Rank
from pipeline.rl.losses.aggregate import Totals


def totals_of(
    rank: Rank, data: StepData, mini_batch: MiniBatch, compared: Compared
) -> tuple[Totals, int]:
    """The tokens and samples that count, and the positions of all samples, prompts too.

    All ranks call, and all get the same. Routes of the mini-batch may still be arriving.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=next(rank.chunks[0].parameters()).device)
    if rank.position.speaks_for_samples:
        for row in mini_batch.rows(rank.position.dp_rank).tolist():
            id = data.ids[row]
            tokens = int(compared.mask[id].sum())
            of_sample = [tokens, int(tokens > 0), len(data.samples[id].tokens_S) - 1]
            sums += torch.tensor(of_sample, dtype=torch.float64, device=sums.device)
    torch.distributed.all_reduce(sums)
    tokens, samples, positions = (int(number) for number in sums.tolist())
    return Totals(tokens, samples), positions
