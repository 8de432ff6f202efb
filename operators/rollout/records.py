"""What the rollout engine is asked for and what it gives back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.traces.records import Routes, VersionSpan


class RolloutError(Exception):
    """A rollout cannot go on; the text names the sample, object or setting and the fix."""


@dataclass(frozen=True)
class Request:
    """One sample to make. Example: Request('000003/17/2', (2, 282, 201), 1234567)."""

    id: str
    """The sample's id, for errors and logs."""
    prompt_tokens: tuple[int, ...]
    """P token ids; the samples of a group have equal ones and share them in the prefix cache."""
    seed: int
    """The sampling seed of this sample alone."""


@dataclass(frozen=True)
class Sampling:
    """How a shard is sampled. Example: Sampling(temperature=1.0, top_p=1.0, top_k=-1, ...)."""

    temperature: float
    """0: greedy."""
    top_p: float
    top_k: int
    """-1: off."""
    max_tokens: int

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any]) -> "Sampling":
        """The sampling parameters of a plan object."""
        settings = plan["sampling"]
        return cls(
            temperature=float(settings["temperature"]),
            top_p=float(settings["top_p"]),
            top_k=int(settings["top_k"]),
            max_tokens=int(settings["max_tokens"]),
        )


@dataclass(frozen=True)
class Finished:
    """One response as it leaves the engine: its routes are not read yet."""

    request: Request
    tokens_G: npt.NDArray[np.uint32]
    logprobs_G: npt.NDArray[np.float32]
    routes_TDK: npt.NDArray[Any] | None
    """The engine's own array, S-1 rows of every decoder layer. None: not recorded, or aborted."""
    finish_reason: str
    version_spans: tuple[VersionSpan, ...]

    @property
    def nbytes(self) -> int:
        """Memory that is free again when this record is."""
        routes = 0 if self.routes_TDK is None else self.routes_TDK.nbytes
        return int(self.tokens_G.nbytes + self.logprobs_G.nbytes + routes)


@dataclass(frozen=True)
class Generation:
    """One response, with what the engine says about it. G tokens, S = P + G."""

    tokens_G: npt.NDArray[np.uint32]
    """The engine's own ids; the end token is the last of them when finish_reason is 'stop'."""
    logprobs_G: npt.NDArray[np.float32]
    """Of the distribution that was sampled from."""
    routes: Routes | None
    """S-1 rows; None: the engine does not record routes."""
    finish_reason: str
    """'stop', 'length' or 'abort'."""
    version_spans: tuple[VersionSpan, ...]
    """Which policy version sampled which tokens; they cover 0..G."""
