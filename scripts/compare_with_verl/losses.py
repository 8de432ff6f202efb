"""Comparison of policy losses and the value loss with verl's."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pipeline.rl.estimators.types import OneRank
from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.aggregate import aggregation
from pipeline.rl.losses.choice import Choice
from pipeline.rl.losses.formulas import value_loss
from pipeline.rl.losses.types import LossTokens
from scripts.compare_with_verl.batch import Array, Batch, Row, apart, tensor

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
SCALE = 64


class Samples:
    """The samples of a batch, all in one micro-batch."""

    counts_samples = True

    def __init__(self, batch: Batch) -> None:
        self._sample_T = torch.from_numpy(np.nonzero(batch.real_BL)[0])
        self._mask_T = torch.from_numpy(batch.flat(batch.mask_BL))
        self._number = len(batch.groups_B)
        self.tokens_S = self.sum(torch.ones(len(self._mask_T), dtype=torch.float64))

    def sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the sum over each sample: [S]."""
        counted_T = torch.where(self._mask_T, values_T, 0)
        return counted_T.new_zeros(self._number).index_add(0, self._sample_T, counted_T)

    def mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the mean over each sample: [S]."""
        return self.sum(values_T) / self.tokens_S.clamp(min=1.0)

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """Return each sample's value at each of its tokens: [T]."""
        return values_S[self._sample_T]


LOSS_SETTINGS: Any = SimpleNamespace(
    clip_low=0.2, clip_high=0.28, clip_ratio_c=3.0, tau_pos=1.0, tau_neg=1.05,
    policy_loss=SimpleNamespace(
        clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=2.0, kl_cov_ratio=0.1, ppo_kl_coef=0.7
    ),
)  # fmt: skip
"""Settings for the losses. With clip_cov_ratio=1, Retrace and verl both select every token between
the bounds. With a smaller ratio, verl would select some of these tokens at random."""


def losses(core: Any, actor: Any) -> Iterator[Row]:
    """Yield comparisons of losses and of their gradients with respect to log-probs.

    The losses and the gradients include importance weights.
    """
    for name, loss in LOSSES.items():
        function = core.get_policy_loss_fn(name)
        for mode in MODES if loss.aggregation is None else (loss.aggregation,):
            config = actor(
                strategy="megatron", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=0.2,
                clip_ratio_high=0.28, loss_agg_mode=mode, global_batch_info={},
            )  # fmt: skip
            if mode == "seq-mean-token-sum-norm":
                config.global_batch_info["loss_scale_factor"] = SCALE
            for field in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio"):
                object.__setattr__(
                    config.policy_loss, field, getattr(LOSS_SETTINGS.policy_loss, field)
                )
            object.__setattr__(config.policy_loss, "ppo_kl_coef", 0.7)

            def difference(
                batch: Batch,
                name: str = name,
                mode: Any = mode,
                config: Any = config,
                function: Any = function,
            ) -> float:
                new = tensor(batch.new_BL).requires_grad_()
                theirs, _ = function(
                    tensor(batch.old_BL), new, tensor(batch.advantages_BL), tensor(batch.mask_BL),
                    mode, config, tensor(batch.weights_BL),
                )  # fmt: skip
                (their_slope,) = torch.autograd.grad(theirs, new)
                ours, slope_T = our_loss(batch, name, mode)
                slope = batch.padded(slope_T)[batch.mask_BL]
                return max(
                    apart(ours, theirs.item()), apart(slope, their_slope.numpy()[batch.mask_BL])
                )

            yield Row(f"`{name}`", function.__name__, mode, difference)


def our_loss(batch: Batch, name: str, mode: Any) -> tuple[float, Array]:
    """Compute Retrace's loss and its gradient.

    Args:
        batch: Batch of samples.
        name: Name of the loss.
        mode: Aggregation of the loss.

    Returns:
        The loss, and its derivative with respect to each token's log-prob, [T].
    """
    loss = LOSSES[name]
    new_T = tensor(batch.flat(batch.new_BL)).requires_grad_()
    mask_T = batch.flat(batch.mask_BL)
    chosen_T = None
    if loss.choose is not None:
        choice = Choice(
            batch.flat(batch.new_BL), batch.flat(batch.old_BL), batch.flat(batch.advantages_BL),
            mask_T, np.arange(len(mask_T), dtype=np.uint64), OneRank(),
        )  # fmt: skip
        chosen_T = torch.from_numpy(loss.choose(choice, LOSS_SETTINGS))
    tokens = LossTokens(
        logprobs_T=new_T, old_T=tensor(batch.flat(batch.old_BL)),
        advantages_T=tensor(batch.flat(batch.advantages_BL)), mask_T=torch.from_numpy(mask_T),
        entropy_T=torch.zeros(len(mask_T)), weights_T=tensor(batch.flat(batch.weights_BL)),
        samples=Samples(batch), chosen_T=chosen_T,
    )  # fmt: skip
    loss_T = loss.function(tokens, LOSS_SETTINGS).loss_T
    added = aggregation(mode, tokens, SCALE)
    weighed_T = loss_T if added.weights_T is None else loss_T * added.weights_T
    total = torch.where(tokens.mask_T, weighed_T, 0).sum() / added.divisor
    (slope_T,) = torch.autograd.grad(total, new_T)
    return total.item(), slope_T.numpy()


def values(core: Any) -> Iterator[Row]:
    """Yield the comparison of the critic's clipped loss, its gradient and the clipped share."""

    def difference(batch: Batch) -> float:
        predicted = tensor(batch.values_BL).requires_grad_()
        before, returns, mask = (
            tensor(one) for one in (batch.advantages_BL, batch.returns_BL, batch.mask_BL)
        )
        theirs, their_share = core.compute_value_loss(predicted, returns, before, mask, 0.5)
        (their_slope,) = torch.autograd.grad(theirs, predicted)
        ours = value_loss(predicted, before, returns, 0.5)
        mean = (ours.loss_T * mask).sum() / mask.sum()
        (slope,) = torch.autograd.grad(mean, predicted)
        share = (ours.clipped_T * mask).sum() / mask.sum()
        return max(
            apart(mean.item(), theirs.item()), apart(slope, their_slope), apart(share, their_share)
        )

    yield Row("value loss", "compute_value_loss", "", difference)
