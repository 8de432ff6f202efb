"""One engine with steps in flight, as on GPUs, through several policies."""

from contextlib import closing

import pytest

from operators.rollout.engine import RolloutEngine, is_eager
from operators.rollout.types import Request, RolloutError
from operators.rollout.vllm_environment import prepare_environment
from pipeline.config.tree import Rollout
from pipeline.hardware import gpu_pool
from pipeline.run.plan import Sampling
from pipeline.traces import Geometry
from tests.integration.rollout.generations import assert_same, generate
from tests.tiny_models import make_tiny

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(gpu_pool()), reason="the GPU build has steps in flight in every test"),
]

SETTINGS = Rollout(dtype="float32", max_num_seqs=8, max_num_batched_tokens=64)
SAMPLING = Sampling(1.0, 1.0, -1, 24)
SHORT = Sampling(1.0, 1.0, -1, 3)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    root = tmp_path_factory.mktemp("late")
    return [make_tiny(root / str(i), "qwen3_moe_dense_first", seed=i) for i in range(2)]


@pytest.fixture(scope="module")
def engine(policies):
    prepare_environment(is_eager(SETTINGS))
    from vllm.config import VllmConfig

    from operators.cpu import vllm_build
    from tests.integration.rollout.late import NAMES

    plain = vllm_build.engine_arguments
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmConfig, "max_concurrent_batches", property(lambda self: 2))
        patch.setattr(vllm_build, "engine_arguments", lambda *given: plain(*given) | NAMES)
        engine = RolloutEngine(policies[0], SETTINGS, True, 128, Geometry(16, 4, (1, 2, 3)))
        # Most tokens end a response, so that responses end before their limit.
        engine._end_tokens = list(range(0, 200, 2))
        yield engine
        engine.close()


def requests(version: int) -> list[Request]:
    return [Request(f"{i}-{version}", list(range(5, 25 + i)), i, False) for i in range(3)]


def in_flight(engine: RolloutEngine) -> int:
    return len(engine._llm.llm_engine.engine_core.engine_core.batch_queue)


def test_policies_change_after_responses_that_ended_by_an_end_token(engine, policies):
    """When the last response ends, a step is in flight; the next policy's samples are complete."""
    first = generate(engine, requests(0), SAMPLING)
    for version in (1, 2, 3):
        assert "stop" in {one.finish_reason for one in first}
        assert in_flight(engine) == 1
        engine.load(policies[version % 2], version)
        assert in_flight(engine) == 0
        later = generate(engine, requests(version), SAMPLING)
        for one, request in zip(later, requests(version), strict=True):
            rows = len(request.prompt_tokens) + len(one.tokens_G) - 1
            assert one.routes.valid_T.tolist() == [True] * rows
            assert {span.version for span in one.version_spans} == {version}
    engine.load(policies[0], 0)
    assert_same(first, generate(engine, requests(0), SAMPLING))


def test_policies_change_after_responses_of_full_length(engine, policies):
    before = generate(engine, requests(0), SHORT)
    engine.load(policies[1], 1)
    engine.load(policies[0], 0)
    assert_same(before, generate(engine, requests(0), SHORT))


def test_policies_change_after_an_early_end(engine, policies):
    """Dynamic sampling ends a step as soon as it has enough groups, and aborts the others."""
    before = generate(engine, requests(0), SAMPLING)
    for version in (1, 0):
        with closing(engine.generate(requests(9), SAMPLING)) as responses:
            next(responses)
        assert in_flight(engine) > 0
        engine.load(policies[version], version)
    assert_same(before, generate(engine, requests(0), SAMPLING))


def test_a_policy_does_not_change_under_running_requests(engine, policies):
    responses = engine.generate(requests(0), SAMPLING)
    next(responses)
    with pytest.raises(RolloutError, match="running"):
        engine.load(policies[1], 1)
    responses.close()
    assert engine.version == 0


def test_an_engine_closes_with_a_step_in_flight(engine):
    """The fixture closes the engine after this test."""
    assert len(generate(engine, requests(0), SAMPLING)) == 3
    assert in_flight(engine) == 1
