"""The records of the trace format, as the rest of the project sees them.

Letters: T rows of a sample (one per position 0..S-2), L MoE layers, K experts per token (top-k),
E experts, P prompt tokens, G response tokens, S = P + G.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["R2", "R3"]
"""R2: recorded by the trainer's log-prob pass; R3: recorded by the rollout engine."""


class TraceError(Exception):
    """A trace is not what it should be; the text names the object or sample, found and expected."""


@dataclass(frozen=True)
class Geometry:
    """Shape of a routing decision. Example: Geometry(experts=16, topk=4, layers=(1, 2, 3))."""

    experts: int
    """E."""
    topk: int
    """K."""
    layers: tuple[int, ...]
    """Model indices of the MoE layers, ascending; dense layers never appear."""

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """uint8 up to 256 experts, uint16 above: the width follows E, never the ids seen."""
        return np.uint8 if self.experts <= 256 else np.uint16


@dataclass(frozen=True)
class Routes:
    """The routing of one sample."""

    sets_TLK: npt.NDArray[Any]
    """Expert ids, Geometry.dtype, ascending in a row. An invalid row holds 0..K-1: no meaning.

    What a reader returns is a view of an array [L, T, K]: a layer's rows lie together.
    """
    valid_T: npt.NDArray[np.bool_]
    """False: the routing of this position is not known; the trainer routes it natively."""


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
    """Of the distribution that was sampled from."""
    finish_reason: str
    """The engine's: 'stop', 'length', 'abort'."""
    version_spans: tuple[VersionSpan, ...]
    seed: int
    reward: float | None
    """None: the reward function raised and reward.on_error is 'mask'; see reward_error."""
    reward_error: str | None
    extras: dict[str, Any]
    """JSON values: what the reward function returned beside the score."""
    routes: Routes | None
    """None: routes were not recorded in this run."""

    @property
    def tokens_S(self) -> npt.NDArray[np.uint32]:
        """Prompt and response."""
        return np.concatenate([self.prompt_tokens_P, self.response_tokens_G])


@dataclass(frozen=True)
class Provenance:
    """Who made a trace."""

    kind: Kind
    policy_version: int
    engine: str
    """Name and version, e.g. 'vllm 0.32.0' or 'megatron-core 0.16.1'."""
