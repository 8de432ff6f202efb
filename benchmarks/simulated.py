"""A real-time simulation of an engine that uses continuous batching and returns recorded routes.

All requests are queued at the start, and 64 run at the same time. Each step adds a token to every
running request, and when a request ends, the next one starts. The time of a step has two parts:
reading the weights, and reading the keys and values of the running sequences. The ratio of these
two times is the ratio of the bytes read, which the docstring of writing.py derives. In each step,
the engine's thread works in Python for 2 ms (scheduling, assigning tokens and routes to requests).
It then sleeps in place of the GPU's work, without holding Python's lock.
"""

import heapq
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from operators.rollout.routes import routes_of
from operators.rollout.types import Finished, Generation, Request
from pipeline.run.plan import Sampling
from pipeline.traces import Geometry, VersionSpan

GEOMETRY = Geometry(experts=128, topk=8, layers=tuple(range(48)))
PROMPT, RESPONSE, RUNNING = 1024, 7168, 64
HOST_S = 0.002
WEIGHTS = 61 / (61 + 67)
"""Share of a step's time spent reading the weights if the batch is full."""


class SimulatedEngine:
    """An engine that returns responses in real time, as with continuous batching."""

    def __init__(self, rate: float, pool: npt.NDArray[np.uint8], seed: int) -> None:
        self._full_step_s = RUNNING / rate
        self._pool = pool
        self._rng = np.random.default_rng(seed)
        self.steps = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Finished]:
        """Yield responses at the times at which a real engine would return them."""
        most = sampling.max_tokens
        lengths = np.minimum(self._rng.lognormal(np.log(6500), 0.5, len(requests)), most)
        waiting = list(zip(requests, lengths.astype(int).tolist(), strict=True))[::-1]
        running: list[tuple[int, int, Request]] = []
        prompts: dict[str, npt.NDArray[np.uint8]] = {}
        while waiting or running:
            while waiting and len(running) < RUNNING:
                request, length = waiting.pop()
                heapq.heappush(running, (self.steps + length, len(waiting), request))
            self._step(len(running))
            while running and running[0][0] <= self.steps:
                _, _, request = heapq.heappop(running)
                length = int(lengths[requests.index(request)])
                yield self._finished(request, length, most, prompts)

    def _step(self, running: int) -> None:
        started = time.perf_counter()
        work = 0
        while time.perf_counter() - started < HOST_S:
            work += sum(range(50))
        share = WEIGHTS + (1 - WEIGHTS) * running / RUNNING
        time.sleep(max(0.0, share * self._full_step_s - HOST_S))
        self.steps += 1

    def _finished(
        self, request: Request, length: int, most: int, prompts: dict[str, npt.NDArray[np.uint8]]
    ) -> Finished:
        group = request.id.rpartition("/")[0]
        if group not in prompts:
            prompts[group] = self._routes(PROMPT)
        # At this point, vLLM joins the pieces of all steps of a request in the engine's thread.
        routes_TDK = np.concatenate([prompts[group], self._routes(length - 1)])
        return Finished(
            request=request,
            tokens_G=self._rng.integers(0, 151_936, length).astype(np.uint32),
            logprobs_G=-self._rng.exponential(0.5, length).astype(np.float32),
            routes_TDK=routes_TDK,
            finish_reason="length" if length == most else "stop",
            version_spans=(VersionSpan(0, 0, length),),
        )

    def _routes(self, rows: int) -> npt.NDArray[np.uint8]:
        """Return routes [rows, 48, 8], joined from pieces of 6 layers and 512 rows of a recording.

        No piece repeats within the same layers of a response, and the experts of each layer are
        renumbered for each response. The file is therefore no more repetitive than a real one.
        """
        tokens, layers = self._pool.shape[1], self._pool.shape[2]
        found = np.empty((rows, len(GEOMETRY.layers), GEOMETRY.topk), np.uint8)
        for first in range(0, len(GEOMETRY.layers), layers):
            order = self._rng.permutation(len(self._pool))
            for place, start in enumerate(range(0, rows, tokens)):
                stop = min(rows, start + tokens)
                found[start:stop, first : first + layers] = self._pool[order[place]][: stop - start]
        found ^= self._rng.integers(0, GEOMETRY.experts, (48, 1)).astype(np.uint8)
        return found

    def read(self, finished: Finished) -> Generation:
        """Return a response with its checked routes, as RolloutEngine does."""
        rows = len(finished.request.prompt_tokens) + len(finished.tokens_G) - 1
        return Generation(
            tokens_G=finished.tokens_G,
            logprobs_G=finished.logprobs_G,
            routes=routes_of(
                finished.routes_TDK, rows, len(GEOMETRY.layers), GEOMETRY, finished.request.id
            ),
            finish_reason=finished.finish_reason,
            version_spans=finished.version_spans,
        )

    def text(self, tokens_G: npt.NDArray[np.uint32]) -> str:
        """Return an empty text, because this benchmark computes no rewards."""
        return ""
