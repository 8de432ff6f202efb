"""Samples and routes in memory, as used throughout the project.

Dimensions: P is the number of prompt tokens, G the number of response tokens, S = P + G, and T the
number of rows of a sample (one per position 0..S-2). L is the number of MoE layers, E the number of
experts and K the number of experts per token (top-k).
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.errors import LastingError

Kind = Literal["R2", "R3"]
"""R2: recorded by the trainer's log-prob pass; R3: recorded by the rollout engine."""


class TraceError(LastingError):
    """A trace is invalid. The message names the object or sample, the value found, and the value
    expected."""


@dataclass(frozen=True)
class Routes:
    """The routes of one sample."""

    sets_TLK: npt.NDArray[Any]
    """Expert ids as Geometry.dtype, ascending in each row. Invalid rows contain 0..K-1 as filler.

    Readers return a view of an array [L, T, K], in which each layer's rows are contiguous.
    """
    valid_T: npt.NDArray[np.bool_]
    """False where the routing is unknown; the trainer routes these positions natively."""


@dataclass(frozen=True)
class VersionSpan:
    """A range [start, end) of response tokens that one policy version generated."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One prompt with one response, as the rollout engine generated it.

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
    """The engine's token ids, never re-tokenised."""
    loss_mask_G: npt.NDArray[np.bool_]
    logprobs_G: npt.NDArray[np.float32]
    """Log-probs under the distribution from which the tokens were sampled."""
    finish_reason: str
    """The reason why the engine stopped: 'stop', 'length' or 'abort'."""
    version_spans: tuple[VersionSpan, ...]
    seed: int
    reward: float | None
    """None if the reward function failed and reward.on_error is 'mask'; see reward_error."""
    reward_error: str | None
    extras: dict[str, Any]
    """JSON values that the reward function returned in addition to the score."""
    routes: Routes | None
    """The sample's routes; None if the run does not record routes."""
    branch_of: str | None = None
    """For a branch, the id of the first sequence of its conversation, in the same group.

    The branch's own id is '{branch_of}.{b}', b = 1, 2, ... None if this is a first sequence.
    """

    @property
    def tokens_S(self) -> npt.NDArray[np.uint32]:
        """Token ids of prompt and response."""
        return np.concatenate([self.prompt_tokens_P, self.response_tokens_G])


@dataclass(frozen=True)
class Provenance:
    """The origin of a trace."""

    kind: Kind
    policy_version: int
    engine: str
    """Name and version, e.g. 'vllm 0.32.0' or 'megatron-core 0.16.1'."""

    def __str__(self) -> str:
        """Return the stored form, as JSON, for messages."""
        return json.dumps(vars(self))


def check_array(value: npt.ArrayLike, where: str) -> npt.NDArray[Any]:
    """Return a value as a numpy array, without a copy if possible.

    Raises TraceError if numpy cannot convert the value, and for an array with a mask.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TraceError(f"{where} is a masked array, expected one without a mask")
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        # Lists of different lengths, tensors on a GPU, or types that numpy does not support.
        raise TraceError(
            f"{where} of type {type(value).__name__} cannot become an array "
            f"({error}); pass numpy arrays, lists, or tensors in CPU memory"
        ) from error
