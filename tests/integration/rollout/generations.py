"""What an engine makes of requests, read and in their order."""

from collections.abc import Sequence
from contextlib import closing

from operators.rollout.engine import RolloutEngine
from operators.rollout.types import Generation, Request
from pipeline.run.plan import Sampling


def generate(
    engine: RolloutEngine, requests: Sequence[Request], sampling: Sampling
) -> list[Generation]:
    """One generation for each request; the engine hands them out as they finish."""
    with closing(engine.generate(requests, sampling)) as responses:
        found = {finished.request.id: engine.read(finished) for finished in responses}
    assert len(found) == len(requests)
    return [found[request.id] for request in requests]
