"""Collect an engine's generations in the order of their requests, and compare generations."""

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from operators.rollout.engine import RolloutEngine
from operators.rollout.types import Generation, Request
from pipeline.run.plan import Sampling


def generate(
    engine: RolloutEngine, requests: Sequence[Request], sampling: Sampling
) -> list[Generation]:
    """Return one generation for each request, in the order of the requests.

    Args:
        engine: The engine, which yields responses as they finish.
        requests: The requests.
        sampling: The sampling settings.
    """
    with closing(engine.generate(requests, sampling)) as responses:
        found = {finished.request.id: engine.read(finished) for finished in responses}
    assert len(found) == len(requests)
    return [found[request.id] for request in requests]


def assert_same(some: Sequence[Generation], others: Sequence[Generation]) -> None:
    """Assert that tokens, routes and log-probs are bit-identical."""
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one.tokens_G, other.tokens_G)
        np.testing.assert_array_equal(one.logprobs_G, other.logprobs_G)
        assert (one.routes is None) == (other.routes is None)
        if one.routes is not None and other.routes is not None:
            np.testing.assert_array_equal(one.routes.sets_TLK, other.routes.sets_TLK)
