"""How the losses of a mini-batch's tokens become one number (verl's loss_agg_mode)."""

from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.rl.losses.types import Samples, Tensor

AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True)
class Aggregation:
    """The mini-batch's loss is the sum of weight * loss over all tokens that count, on all ranks
    and micro-batches, divided by the sum of their divisors."""

    weights_T: Tensor | float
    divisor: Tensor
    """A number of tokens or samples, int32."""


@dataclass(frozen=True)
class Totals:
    """What counts in a mini-batch, on all ranks and in all micro-batches."""

    tokens: int
    samples: int
    """Those with a token that counts."""

    def divisor(self, mode: AggregationMode) -> int:
        """The sum of the divisors of its micro-batches."""
        return self.tokens if mode == "token-mean" else self.samples


class Counted(Protocol):
    """The tokens of a micro-batch, of a policy loss or of a value loss."""

    @property
    def mask_T(self) -> Tensor:
        """Bool: whether a token counts."""

    @property
    def samples(self) -> Samples:
        """Which tokens belong together."""


def aggregation(mode: AggregationMode, tokens: Counted, scale_factor: float) -> Aggregation:
    """Weigh the tokens of a micro-batch.

    token-mean: the mean over all tokens of the mini-batch. seq-mean-token-sum: the mean over
    samples of the sum over a sample's tokens; seq-mean-token-mean: of the mean over them;
    seq-mean-token-sum-norm: of the sum divided by `scale_factor`. Samples without a token that
    counts are left out.

    Source: verl's agg_loss; token-mean is DAPO's (arXiv 2503.14476), seq-mean-token-mean GRPO's
    (arXiv 2402.03300), seq-mean-token-sum-norm Dr. GRPO's (arXiv 2503.20783).
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
