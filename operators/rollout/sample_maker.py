"""The making of samples from finished responses, in the writer's thread."""

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
    """The interface of the rollout engine."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> Generator[Finished, None, None]:
        """Yield responses as they finish; see RolloutEngine."""

    def read(self, finished: Finished) -> Generation:
        """Read and check a response with its routes. Raises TraceError, naming the sample."""

    def text(self, tokens_G: npt.NDArray[np.uint32]) -> str:
        """Decode a response without special tokens."""


@dataclass(frozen=True)
class Response:
    """A finished response whose reward is being computed."""

    finished: Finished
    scored: Future[Scored]


class SampleMaker:
    """Reads responses, waits for their rewards and adds them; counts them and the seconds spent.

    `routes`: whether the samples keep their routes. Work on arrays is counted in CPU seconds, as
    waiting for Python's lock or for a core delays no other work.
    Raises TraceError and RewardError, each naming the sample, and what `add` raises.
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
        """CPU seconds: routes from the engine's array to checked, sorted sets."""
        self.score_s = 0.0
        """Seconds of waiting for rewards that were not there yet."""
        self.add_s = 0.0
        """CPU seconds: encoding, digests, handing bytes to the store."""
        self.samples = self.tokens = 0
        """Samples, and tokens of their responses."""
        self.masked = 0
        """Samples without a reward, because the reward function failed."""
        self.lacking = 0
        """Samples without routes for some rows."""
        self.extras: ExtraSums = {}
        """What the reward function returned beside the score."""
        self.sources: SourceSums = {}
        """Rewards and extras by data source."""

    def score(self, finished: Finished) -> Response:
        """Have a response scored, from the engine's thread; the rest is done by the call.

        What was aborted is no answer: it has no reward, whatever `reward.on_error` is.
        """
        if finished.finish_reason == "abort":
            scored: Future[Scored] = Future()
            scored.set_result(Scored(None, "not scored: the engine aborted the request", {}))
            return Response(finished, scored)
        wanted = self._wanted[finished.request.id]
        text = partial(self._engine.text, finished.tokens_G)
        return Response(finished, self._scorer.submit(wanted, text, len(finished.tokens_G)))

    def __call__(self, response: Response) -> None:
        """Make one sample."""
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
        if not wanted.baseline:
            add_extras(self.extras, sample.extras)
            source = wanted.prompt.data_source
            add_to_source(self.sources, source, sample.reward, sample.extras)
        self.lacking += sample.routes is not None and not sample.routes.valid_T.all()

    def finish(self, work: Callable[[], None]) -> None:
        """Run `work`, the rest of encoding and upload, after all samples were added."""
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
