"""Samples and routes in memory, as the rest of the project uses them.

Letters: T rows of a sample (one per position 0..S-2), L MoE layers, K experts per token (top-k),
E experts, P prompt tokens, G response tokens, S = P + G.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.errors import LastingError

Kind = Literal["R2", "R3"]
"""R2: recorded by the trainer's log-prob pass; R3: recorded by the rollout engine."""


class TraceError(LastingError):
    """A trace is wrong; the text names the object or sample, what was found and what expected."""


@dataclass(frozen=True)
class Routes:
    """The routing of one sample."""

    sets_TLK: npt.NDArray[Any]
    """Expert ids, Geometry.dtype, ascending in each row. Invalid rows hold 0..K-1, without meaning.

    Readers return a view of an array [L, T, K]: a layer's rows are contiguous.
    """
    valid_T: npt.NDArray[np.bool_]
    """False: the routing of this position is unknown; the trainer routes it natively."""


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) came from this policy version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One prompt with one response, as the rollout engine made it.

    Example: Sample(id='000003/17/2', group='000003/17', prompt_id='17', ...).
    """

    id: str
    """'{step:06d}/{prompt_id}/{k}', k = 0..n-1."""
    group: str
    """'{step:06d}/{prompt_id}'."""
    prompt_id: str
    """'{row}' of the staged prompt table, or '{row}.{epoch}' from epoch 1 on."""
    prompt_tokens_P: npt.NDArray[np.uint32]
    response_tokens_G: npt.NDArray[np.uint32]
    """The engine's own ids, never re-tokenised."""
    loss_mask_G: npt.NDArray[np.bool_]
    logprobs_G: npt.NDArray[np.float32]
    """Log-probs under the distribution that was sampled from."""
    finish_reason: str
    """The engine's reason: 'stop', 'length' or 'abort'."""
    version_spans: tuple[VersionSpan, ...]
    seed: int
    reward: float | None
    """None: the reward function raised and reward.on_error is 'mask'; see reward_error."""
    reward_error: str | None
    extras: dict[str, Any]
    """JSON values that the reward function returned beside the score."""
    routes: Routes | None
    """None: routes were not recorded in this run."""
    branch_of: str | None = None
    """Id of the first sequence of this sample, in the same group, for a branch of a conversation:
    this id is '{branch_of}.{b}', b = 1, 2, ...; None: this is a first sequence."""

    @property
    def tokens_S(self) -> npt.NDArray[np.uint32]:
        """Token ids of prompt and response."""
        return np.concatenate([self.prompt_tokens_P, self.response_tokens_G])


@dataclass(frozen=True)
class Provenance:
    """Origin of a trace."""

    kind: Kind
    policy_version: int
    engine: str
    """Name and version, e.g. 'vllm 0.32.0' or 'megatron-core 0.16.1'."""
