"""The loss of a mini-batch, computed on one rank, as one micro-batch, in double precision.

Dimensions: T is the number of response tokens in the mini-batch, concatenated sample by sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from operators.training.batches.hashing import hashes, salt
from operators.training.passes.objective import (
    Targets,
    loss_and_report,
    loss_of,
    objective_of,
)
from pipeline.rl.corrections.apply import Sampled, correct
from pipeline.rl.estimators.types import OneRank
from pipeline.rl.losses.aggregate import AggregationMode, Totals
from pipeline.rl.losses.choice import Choice
from tests.integration.training_replay.losses_in_layouts import REJECTING, REJECTION, config_with
from tests.integration.training_replay.sealed import config_of
from tests.unit.rl.losses.batches import OneRank as OneRankOfSamples


@dataclass(frozen=True)
class Unsplit:
    """Means over the mini-batch, and the gradients of the full loss."""

    divisor: int
    policy: float
    kl: float
    logprobs_T: np.ndarray
    entropy_T: np.ndarray


def unsplit(
    values: dict[str, np.ndarray], pair: tuple[str, AggregationMode]
) -> tuple[Sequence[str], Unsplit]:
    """Compute the loss of a mini-batch from the values that ranks have written.

    Args:
        values: The values of all ranks, summed (`losses_in_layouts.py`).
        pair: The loss and the aggregation mode.

    Returns:
        The ids of the samples in order, and the loss.
    """
    start = f"{pair[0]}:{pair[1]}:new:"
    ids = [name.removeprefix(start) for name in sorted(values) if name.startswith(start)]

    def joined(prefix: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([values[f"{prefix}:{id}"] for id in ids]))

    new_T = joined(start[:-1]).requires_grad_()
    old_T, advantages_T, weights_T, reference_T = (
        joined(f"read:{kind}").double() for kind in ("old", "advantages", "weights", "reference")
    )
    mask_T = joined("read:mask").bool()
    lengths = [len(values[f"read:mask:{id}"]) for id in ids]
    sample_T = torch.from_numpy(np.repeat(np.arange(len(ids)), lengths))
    if pair[0].startswith(REJECTING):
        sampled = [x.detach().numpy() for x in (new_T, old_T, mask_T)]
        kept_T = correct(REJECTION.correction, Sampled(*sampled, np.array(lengths))).mask_T
        assert 0.1 < kept_T.sum() / mask_T.sum() < 0.9
        mask_T, weights_T = torch.from_numpy(kept_T), None
    # The loss is linear in the entropy, so the entropy's value does not affect the gradient.
    entropy_T = torch.zeros_like(new_T).requires_grad_()
    config = config_with(config_of(), *pair)
    actor, choose = config.actor_rollout_ref.actor, loss_of(config).choose
    chosen_T = None
    if choose is not None:
        read = [x.detach().numpy() for x in (new_T, old_T, advantages_T, mask_T)]
        chosen_T = torch.from_numpy(choose(Choice(*read, _draws(ids, lengths), OneRank()), actor))
        assert 0 < chosen_T.sum() < mask_T.sum()
    targets = Targets(
        mask_T=mask_T,
        advantages_T=advantages_T,
        old_T=old_T,
        reference_T=reference_T,
        weights_T=weights_T,
        samples=OneRankOfSamples(sample_T, mask_T, len(ids)),
        chosen_T=chosen_T,
    )
    totals = Totals(int(mask_T.sum()), len({*sample_T[mask_T].tolist()}))
    assert 0 < totals.samples < len(ids)
    loss, divisor, report = loss_and_report(objective_of(config), targets, totals, new_T, entropy_T)
    (loss / divisor).backward()
    return ids, Unsplit(
        int(divisor),
        *(float(report[what]) / int(divisor) for what in ("policy", "kl")),
        new_T.grad.numpy(),
        entropy_T.grad.numpy(),
    )


def _draws(ids: Sequence[str], lengths: Sequence[int]) -> np.ndarray:
    """Return random numbers that depend on the sample's manifest row and the token's position.

    The manifest has 3 samples for each of 4 prompts, in order.
    """
    rows = [3 * int(id.split("/")[1]) + int(id.split("/")[2]) for id in ids]
    places = [row << 32 | np.arange(G) for row, G in zip(rows, lengths, strict=True)]
    return hashes(np.concatenate(places), salt(1, 0, 0, "tokens"))
