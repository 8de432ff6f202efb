"""Aggregation of the losses of a mini-batch's tokens into one number (verl's loss_agg_mode)."""

from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.rl.losses.types import Samples, Tensor

AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True)
class Aggregation:
    """The weights of a micro-batch's token losses, and the micro-batch's part of the divisor.

    The mini-batch's loss is the sum of weight * loss over all tokens included in it, on all
    ranks and in all micro-batches, divided by the sum of all divisors.
    """

    weights_T: Tensor | float
    divisor: Tensor
    """A number of tokens or samples, int32."""


@dataclass(frozen=True)
class Totals:
    """Counts for a mini-batch, over all ranks and micro-batches."""

    tokens: int
    """Number of tokens included in the loss."""
    samples: int
    """Number of samples with a token in the loss."""

    def divisor(self, mode: AggregationMode) -> int:
        """Return the sum of the divisors of all micro-batches."""
        return self.tokens if mode == "token-mean" else self.samples


class Counted(Protocol):
    """The tokens of a micro-batch, in a policy loss or a value loss."""

    @property
    def mask_T(self) -> Tensor:
        """Whether a token is included in the loss, bool."""

    @property
    def samples(self) -> Samples:
        """The samples to which the tokens belong."""


def aggregation(mode: AggregationMode, tokens: Counted, scale_factor: float) -> Aggregation:
    """Return the weights and the divisor for a micro-batch.

    The modes:

    - token-mean: the mean over all tokens of the mini-batch;
    - seq-mean-token-sum: the sum over each sample's tokens, then the mean over samples;
    - seq-mean-token-mean: the mean over each sample's tokens, then the mean over samples;
    - seq-mean-token-sum-norm: the result of seq-mean-token-sum, divided by `scale_factor`.

    Samples without a token in the loss are omitted.

    Source: verl's agg_loss. token-mean comes from DAPO (arXiv 2503.14476), seq-mean-token-mean
    from GRPO (arXiv 2402.03300), and seq-mean-token-sum-norm from Dr. GRPO (arXiv 2503.20783).

    Args:
        mode: verl's loss_agg_mode.
        tokens: The tokens of the micro-batch.
        scale_factor: The divisor of seq-mean-token-sum-norm; other modes ignore it.
    """
    if mode == "token-mean":
        return Aggregation(1.0, tokens.mask_T.sum().int())
    samples = tokens.samples
    number = (samples.tokens_S > 0).sum().int()
    divisor = number if samples.counts_samples else number * 0
    if mode == "seq-mean-token-mean":
        return Aggregation(samples.spread(1.0 / samples.tokens_S.clamp(min=1.0)), divisor)
    if mode == "seq-mean-token-sum-norm":
        return Aggregation(1.0 / scale_factor, divisor)
    return Aggregation(1.0, divisor)
