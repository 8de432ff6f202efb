"""Random ragged batches of tokens, in the form that the losses expect."""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.config.actor import Actor
from pipeline.rl.losses.types import LossTokens

LENGTHS = (5, 1, 0, 13, 40, 2)
"""Number of response tokens in each sample. The second sample has no token in the loss."""
ACTOR = Actor(clip_ratio_low=0.2, clip_ratio_high=0.3)


@dataclass(frozen=True)
class OneRank:
    """The samples of one rank; the tokens of a sample are adjacent."""

    sample_T: torch.Tensor
    mask_T: torch.Tensor
    number: int = len(LENGTHS)
    counts_samples: bool = True

    @property
    def tokens_S(self) -> torch.Tensor:
        """Number of each sample's tokens that are included in the loss."""
        return self.sum(torch.ones(len(self.sample_T), dtype=torch.float64))

    def sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return each sample's sum over the tokens in the loss."""
        values_T = torch.where(self.mask_T, values_T, 0)
        return values_T.new_zeros(self.number).index_add(0, self.sample_T, values_T)

    def mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return each sample's mean over the tokens in the loss."""
        return self.sum(values_T) / self.tokens_S.clamp(min=1)

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """Repeat each sample's value for its tokens."""
        return values_S[self.sample_T]


def make_tokens(
    seed: int, *, of_sample: bool = True, weighted: bool = False, spread: float = 0.5
) -> LossTokens:
    """Return a random micro-batch in double precision.

    With `of_sample`, all tokens of a sample have the same advantage.
    """
    rng = np.random.default_rng(seed)
    sample_T = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    T = len(sample_T)
    mask_T = (rng.random(T) < 0.8) & (sample_T != 1)
    old_T = -rng.exponential(1.0, T) - 0.01
    new_T = np.minimum(old_T + rng.normal(0, spread, T), -0.005)
    A_T = rng.normal(0, 1, len(LENGTHS))[sample_T] if of_sample else rng.normal(0, 1, T)
    weights_T = rng.uniform(0.2, 2, T) if weighted else None
    return LossTokens(
        logprobs_T=torch.from_numpy(new_T).requires_grad_(),
        old_T=torch.from_numpy(old_T),
        advantages_T=torch.from_numpy(A_T),
        mask_T=torch.from_numpy(mask_T),
        entropy_T=torch.from_numpy(rng.uniform(0, 2, T)),
        weights_T=None if weights_T is None else torch.from_numpy(weights_T),
        samples=OneRank(torch.from_numpy(sample_T), torch.from_numpy(mask_T)),
        chosen_T=torch.from_numpy(rng.random(T) < 0.3),
    )
