"""From a finished response to a sample: what the writer's thread does with each."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from operators.rollout.prompts import Wanted
from operators.rollout.records import Finished, Generation
from operators.rollout.scoring import Scorer
from pipeline.traces import Sample


class Reader(Protocol):
    """What is asked of the engine, beside its work."""

    def read(self, finished: Finished) -> Generation:
        """A response with its routes, checked. Raises TraceError, naming the sample."""

    def text(self, tokens_G: npt.NDArray[np.uint32]) -> str:
        """A response without special tokens."""


class Making:
    """Reads, scores and adds responses, one call for each; counts its seconds.

    `routes` says whether the samples keep theirs. Raises TraceError and RewardError, each naming
    the sample, and what `add` raises.
    """

    capture_s: float
    """Routes from the engine's array to checked, sorted sets."""
    score_s: float
    """Text and reward function."""
    add_s: float
    """Encoding and upload."""

    def __init__(
        self,
        reader: Reader,
        scorer: Scorer,
        wanted: Iterable[Wanted],
        routes: bool,
        add: Callable[[Sample], None],
    ) -> None:
        self.capture_s = self.score_s = self.add_s = 0.0
        self._reader = reader
        self._scorer = scorer
        self._wanted = {one.id: one for one in wanted}
        self._routes = routes
        self._add = add

    def __call__(self, finished: Finished) -> None:
        """Make one sample."""
        started = time.monotonic()
        generation = self._reader.read(finished)
        captured = time.monotonic()
        sample = self._sample(self._wanted[finished.request.id], generation)
        scored = time.monotonic()
        self._add(sample)
        self.capture_s += captured - started
        self.score_s += scored - captured
        self.add_s += time.monotonic() - scored

    def _sample(self, wanted: Wanted, generation: Generation) -> Sample:
        scored = self._scorer(wanted, self._reader.text(generation.tokens_G))
        return Sample(
            id=wanted.id,
            group=wanted.group,
            prompt_id=wanted.prompt_id,
            prompt_tokens_P=np.array(wanted.prompt.tokens, np.uint32),
            response_tokens_G=generation.tokens_G,
            loss_mask_G=np.ones(len(generation.tokens_G), bool),
            logprobs_G=generation.logprobs_G,
            finish_reason=generation.finish_reason,
            version_spans=generation.version_spans,
            seed=wanted.seed,
            reward=scored.reward,
            reward_error=scored.error,
            extras=scored.extras,
            routes=generation.routes if self._routes else None,
        )
