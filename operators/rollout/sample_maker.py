"""Builds samples from finished responses, in the writer's thread."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from operators.rollout.prompts import Wanted
from operators.rollout.scoring import Scored, Scorer
from operators.rollout.types import Finished, Generation, Request
from pipeline.rl.extra_means import ExtraSums, SourceSums, add_extras, add_to_source
from pipeline.run.plan import Sampling
from pipeline.traces import Sample


class Engine(Protocol):
    """The part of the rollout engine's interface that this module uses."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> Generator[Finished, None, None]:
        """Yield responses as they finish; see RolloutEngine."""

    def read(self, finished: Finished) -> Generation:
        """Read and check a response and its routes. Raises a TraceError that names the sample."""

    def text(self, tokens_G: npt.NDArray[np.uint32]) -> str:
        """Decode a response without special tokens."""


@dataclass(frozen=True)
class Response:
    """A finished response whose reward is being computed."""

    finished: Finished
    scored: Future[Scored]


class SampleMaker:
    """Builds samples from responses and their rewards, and counts and times its own work.

    Work on arrays is measured in CPU seconds. Time spent waiting for Python's global lock or for a
    core is not counted, because waiting delays no other work. Calling the maker may raise a
    TraceError or RewardError that names the sample, or any exception that `add` raises.

    Args:
        engine: Reads the responses.
        scorer: Computes the rewards.
        wanted: The planned samples that the responses belong to.
        add: Called with each finished sample.
        routes: Whether the samples keep their routes.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        wanted: Iterable[Wanted],
        add: Callable[[Sample], None],
        routes: bool,
    ) -> None:
        self._engine = engine
        self._scorer = scorer
        self._wanted = {one.id: one for one in wanted}
        self._add = add
        self._routes = routes
        self.capture_s = 0.0
        """CPU seconds spent on turning the engine's arrays into checked, sorted sets."""
        self.score_s = 0.0
        """Seconds spent waiting for rewards."""
        self.add_s = 0.0
        """CPU seconds spent on encoding, computing digests and passing bytes to the store."""
        self.samples = self.tokens = 0
        """The number of samples, and the number of tokens in their responses."""
        self.masked = 0
        """The number of samples without a reward, because the reward function failed."""
        self.left_out = 0
        """The number of values that the reward function returned but the samples cannot hold."""
        self.lacking = 0
        """The number of samples that lack routes for some rows."""
        self.extras: ExtraSums = {}
        """Sums of the values that the reward function returned in addition to the score."""
        self.sources: SourceSums = {}
        """Sums of rewards and extras for each data source."""

    def score(self, finished: Finished) -> Response:
        """Submit a response for scoring; called in the engine's thread.

        Calling the maker with the returned Response completes the sample. An aborted response is
        not an answer, so it gets no reward, regardless of `reward.on_error`.
        """
        if finished.finish_reason == "abort":
            scored: Future[Scored] = Future()
            scored.set_result(Scored(None, "not scored: the engine aborted the request", {}))
            return Response(finished, scored)
        wanted = self._wanted[finished.request.id]
        text = partial(self._engine.text, finished.tokens_G)
        return Response(finished, self._scorer.submit(wanted, text, len(finished.tokens_G)))

    def __call__(self, response: Response) -> None:
        """Build one sample and add it; called in the writer's thread."""
        finished = response.finished
        started = time.thread_time()
        generation = self._engine.read(finished)
        self.capture_s += time.thread_time() - started
        started = time.monotonic()
        scored = response.scored.result()
        self.score_s += time.monotonic() - started
        wanted = self._wanted[finished.request.id]
        sample = self._sample(wanted, generation, scored)
        started = time.thread_time()
        self._add(sample)
        self.add_s += time.thread_time() - started
        self.samples += 1
        self.tokens += len(sample.response_tokens_G)
        self.masked += sample.reward is None
        self.left_out += scored.left_out
        if not wanted.baseline:
            add_extras(self.extras, sample.extras)
            source = wanted.prompt.data_source
            add_to_source(self.sources, source, sample.reward, sample.extras)
        self.lacking += sample.routes is not None and not sample.routes.valid_T.all()

    def finish(self, work: Callable[[], None]) -> None:
        """Run and time `work`, which completes encoding and upload.

        The caller must have added all samples.
        """
        started = time.thread_time()
        work()
        self.add_s += time.thread_time() - started

    def _sample(self, wanted: Wanted, generation: Generation, scored: Scored) -> Sample:
        counts = generation.finish_reason != "abort" and not wanted.baseline
        return Sample(
            id=wanted.id,
            group=wanted.group,
            prompt_id=wanted.prompt_id,
            prompt_tokens_P=np.array(wanted.prompt.tokens, np.uint32),
            response_tokens_G=generation.tokens_G,
            loss_mask_G=np.full(len(generation.tokens_G), counts),
            logprobs_G=generation.logprobs_G,
            finish_reason=generation.finish_reason,
            version_spans=generation.version_spans,
            seed=wanted.seed,
            reward=scored.reward,
            reward_error=scored.error,
            extras=scored.extras,
            routes=generation.routes if self._routes else None,
        )
