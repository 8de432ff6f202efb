"""The rollout engine's requests and results."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.traces.format.types import Routes, VersionSpan

FINISH_REASONS = ("stop", "length", "abort")
"""Why generation ended: at an end token, at the longest length, or because the engine gave up."""


class RolloutError(Exception):
    """A rollout cannot continue; the text names the sample, object or setting and the fix."""


@dataclass(frozen=True)
class Request:
    """One sample to make. Example: Request('000003/17/2', (2, 282, 201), 1234567)."""

    id: str
    """The sample's id, for errors and logs."""
    prompt_tokens: tuple[int, ...]
    """P token ids, equal for all samples of a group, which share them in the prefix cache."""
    seed: int
    """The sampling seed of this sample alone."""
    greedy: bool = False
    """Whether the likeliest token is taken each time, whatever the sampling of the others is."""


@dataclass(frozen=True)
class Finished:
    """One response of the engine, whose routes are not yet read.

    Raises RolloutError, naming the sample, for a finish reason that is none of FINISH_REASONS.
    """

    request: Request
    tokens_G: npt.NDArray[np.uint32]
    logprobs_G: npt.NDArray[np.float32]
    routes_TDK: npt.NDArray[Any] | None
    """The engine's own array, S-1 rows for every decoder layer. None: not recorded, or aborted."""
    finish_reason: str
    """One of FINISH_REASONS."""
    version_spans: tuple[VersionSpan, ...]

    def __post_init__(self) -> None:
        """Refuse what the trainer would not know how to treat."""
        if self.finish_reason not in FINISH_REASONS:
            raise RolloutError(
                f"sample {self.request.id}: the engine ended it with {self.finish_reason!r}, "
                f"expected one of {FINISH_REASONS}; start the worker again, which makes the shard "
                "anew, and look at the engine's log"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are freed with this object."""
        routes = 0 if self.routes_TDK is None else self.routes_TDK.nbytes
        return int(self.tokens_G.nbytes + self.logprobs_G.nbytes + routes)


@dataclass(frozen=True)
class Generation:
    """One response, with the engine's data about it. G tokens, S = P + G."""

    tokens_G: npt.NDArray[np.uint32]
    """The engine's own ids; the last one is the end token when finish_reason is 'stop'."""
    logprobs_G: npt.NDArray[np.float32]
    """Log-probs under the distribution that was sampled from."""
    routes: Routes | None
    """S-1 rows; None: the engine does not record routes."""
    finish_reason: str
    """One of FINISH_REASONS."""
    version_spans: tuple[VersionSpan, ...]
    """The policy version of each range of tokens; the spans cover 0..G."""
