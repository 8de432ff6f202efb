"""Requests to the rollout engine, and the engine's results."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import LastingError
from pipeline.traces.format.types import Routes, VersionSpan

FINISH_REASONS = ("stop", "length", "abort")
"""Reasons why generation ended: an end token, the maximum length, or an abort by the engine."""


class RolloutError(Exception):
    """An error that stops a rollout.

    The message names the sample, object or setting, and gives a fix.
    """


class UnusablePolicyError(RolloutError, LastingError):
    """The policy gives no finite log-probs, so every restart would fail in the same way."""


@dataclass(frozen=True)
class Request:
    """One sample to generate. Example: Request('000003/17/2', (2, 282, 201), 1234567)."""

    id: str
    """The sample's id, for error messages and logs."""
    prompt_tokens: tuple[int, ...]
    """P token ids, the same for all samples of a group, so that these samples share prefix cache
    entries."""
    seed: int
    """The sampling seed of this sample."""
    greedy: bool = False
    """Whether the engine always takes the likeliest token, regardless of the plan's sampling."""


@dataclass(frozen=True)
class Finished:
    """One response from the engine; its routes have not been read yet.

    Raises RolloutError, naming the sample, if the finish reason is not one of FINISH_REASONS.
    """

    request: Request
    tokens_G: npt.NDArray[np.uint32]
    logprobs_G: npt.NDArray[np.float32]
    routes_TDK: npt.NDArray[Any] | None
    """The engine's own array with S-1 rows and all decoder layers. None if the engine did not
    record routes or aborted the request."""
    finish_reason: str
    """One of FINISH_REASONS."""
    version_spans: tuple[VersionSpan, ...]

    def __post_init__(self) -> None:
        """Refuse finish reasons that the trainer does not support."""
        if self.finish_reason not in FINISH_REASONS:
            raise RolloutError(
                f"sample {self.request.id}: the engine ended it with {self.finish_reason!r}, "
                f"expected one of {FINISH_REASONS}; check the engine's log, and restart the "
                "worker, so that it generates the shard again"
            )

    @property
    def nbytes(self) -> int:
        """The memory that is freed with this object, in bytes."""
        routes = 0 if self.routes_TDK is None else self.routes_TDK.nbytes
        return int(self.tokens_G.nbytes + self.logprobs_G.nbytes + routes)


@dataclass(frozen=True)
class Generation:
    """One response with its checked routes. The response has G tokens; S = P + G."""

    tokens_G: npt.NDArray[np.uint32]
    """The engine's own token ids. The last is the end token if finish_reason is 'stop'."""
    logprobs_G: npt.NDArray[np.float32]
    """The log-probs under the distribution that the tokens were sampled from."""
    routes: Routes | None
    """Routes for S-1 rows; None if the engine does not record routes."""
    finish_reason: str
    """One of FINISH_REASONS."""
    version_spans: tuple[VersionSpan, ...]
    """The policy version of each range of tokens; the spans cover 0..G."""
