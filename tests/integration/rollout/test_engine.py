"""The engine against an independent forward pass: routes, log-probs, reload."""

from contextlib import closing

import numpy as np
import pytest

from operators.rollout import cpu_vllm
from operators.rollout.engine import RolloutEngine, _sampling_params
from operators.rollout.types import Request, RolloutError
from pipeline import progress
from pipeline.config.tree import Rollout
from pipeline.progress import read_progress
from pipeline.run.plan import Sampling
from pipeline.traces import Geometry, VersionSpan
from tests.integration.rollout.agreement import assert_agrees
from tests.integration.rollout.generations import generate
from tests.integration.rollout.reference import ReferenceModel
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.integration

GEOMETRY = Geometry(16, 4, (1, 2, 3))
TEMPERATURE = 0.7
SAMPLING = Sampling(TEMPERATURE, 1.0, -1, 80)
KV_BLOCKS = 20
SETTINGS = Rollout(dtype="float32", max_num_seqs=8, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Two policies of one model, its first layer dense."""
    root = tmp_path_factory.mktemp("policies")
    return [make_tiny(root / str(i), "qwen3_moe_dense_first", seed=i) for i in range(2)]


@pytest.fixture(scope="module")
def references(policies):
    return [ReferenceModel(folder) for folder in policies]


class Witness:
    """What happened inside the engine: nothing is replaced, calls are counted."""

    preemptions = 0
    cached_tokens = 0


@pytest.fixture(scope="module")
def witness():
    return Witness()


@pytest.fixture(scope="module")
def engine(policies, witness):
    """One engine for the module, with a KV cache that is too small for a full batch."""
    patch = pytest.MonkeyPatch()
    pages = cpu_vllm.PlainWorker.get_kv_cache_spec

    def small(worker):
        return KV_BLOCKS * sum(spec.page_size_bytes for spec in pages(worker).values())

    preempt = cpu_vllm.RoutesScheduler._preempt_request

    def counted(scheduler, *args, **kwargs):
        witness.preemptions += 1
        return preempt(scheduler, *args, **kwargs)

    finished = RolloutEngine._finished

    def seen(self, request, output):
        witness.cached_tokens += output.num_cached_tokens
        return finished(self, request, output)

    patch.setattr(cpu_vllm.PlainWorker, "determine_available_memory", small)
    patch.setattr(cpu_vllm.RoutesScheduler, "_preempt_request", counted)
    patch.setattr(RolloutEngine, "_finished", seen)
    engine = RolloutEngine(policies[0], SETTINGS, True, 256, GEOMETRY)
    yield engine
    engine.close()
    patch.undo()


def requests(seed: int, lengths=(100, 1, 70, 33), group: int = 4) -> list[Request]:
    """Groups that share a prompt, from one token to longer than the engine's batch."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(2, 300, length).tolist()) for length in lengths]
    return [
        Request(f"{seed:06d}/{p}/{k}", prompt, 1000 * seed + 10 * p + k)
        for p, prompt in enumerate(prompts)
        for k in range(group)
    ]


def test_routes_and_logprobs_equal_an_independent_forward(engine, references, witness):
    """The engine meets everything that could lose or shift rows: groups that share a prompt
    (prefix hits within and between calls), prompts longer than its batch (chunked prefill) and
    more sequences than its cache holds (preemption). All rows are valid and equal the top-k of
    transformers' routers on the same tokens; log-probs are of the temperature sampled at.
    """
    asked = requests(1)
    assert len(asked[0].prompt_tokens) > SETTINGS.max_num_batched_tokens
    cold = generate(engine, asked, SAMPLING)
    assert witness.preemptions > 0
    assert witness.cached_tokens > 0
    before = witness.cached_tokens
    warm = generate(engine, asked, SAMPLING)
    assert witness.cached_tokens > before
    rows, ties = assert_agrees(references[0], asked, cold, TEMPERATURE)
    assert rows > 3000
    assert ties <= rows // 1000, f"{ties} near-ties in {rows} rows"
    assert_agrees(references[0], asked, warm, TEMPERATURE)
    for generation in (*cold, *warm):
        assert generation.version_spans == (VersionSpan(0, 0, len(generation.tokens_G)),)
        assert generation.finish_reason in ("stop", "length")
        assert (generation.finish_reason == "stop") == (generation.tokens_G[-1] == 0)


def test_a_sample_depends_on_its_seed_alone(engine):
    """The samples of a group differ; the same request alone gives the same tokens, though its
    prompt was computed in pieces beside others the first time.
    """
    asked = requests(2, lengths=(90, 40))
    generations = generate(engine, asked, SAMPLING)
    assert len({generation.tokens_G.tobytes() for generation in generations}) == len(asked)
    [alone] = generate(engine, asked[2:3], SAMPLING)
    np.testing.assert_array_equal(alone.tokens_G, generations[2].tokens_G)
    assert "<|" not in engine.text(alone.tokens_G)


def test_responses_come_as_they_finish(engine):
    """In any order, while others are still generated, and with the tokens that vLLM's own
    `generate` returns for the same seeds when all are done.
    """
    asked = requests(7, lengths=(30, 5, 60))
    unfinished, found = [], {}
    for finished in engine.generate(asked, SAMPLING):
        unfinished.append(engine._llm.llm_engine.get_num_unfinished_requests())
        found[finished.request.id] = finished.tokens_G.tolist()
    assert sorted(found) == sorted(request.id for request in asked)
    assert unfinished[0] >= len(asked) // 2
    assert unfinished[-1] == 0
    outputs = engine._llm.generate(
        [{"prompt_token_ids": list(request.prompt_tokens)} for request in asked],
        [_sampling_params(request, SAMPLING) for request in asked],
        use_tqdm=False,
    )
    assert [found[request.id] for request in asked] == [o.outputs[0].token_ids for o in outputs]


def test_the_display_is_told_how_far_generation_is(engine, tmp_path, monkeypatch):
    """Tokens are counted as they are made: none of the samples has finished yet."""
    path = tmp_path / "rollout-0.json"
    monkeypatch.setenv(*progress.environment(path).popitem())
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    asked = requests(9, lengths=(40, 40))
    progress.say("generating", len(asked), "samples")
    with closing(engine.generate(asked, SAMPLING)) as responses:
        next(responses)
        early = read_progress(path)
        list(responses)
    late = read_progress(path)
    assert early.finished == 0
    assert early.tokens_per_s > 0
    assert (late.finished, late.total) == (len(asked), len(asked))


def test_an_iterator_that_is_closed_aborts_what_is_left(engine, policies):
    """The engine is at rest, loads another policy and makes the same samples as before."""
    asked = requests(8, lengths=(40, 20))
    before = generate(engine, asked, SAMPLING)
    with closing(engine.generate(asked, SAMPLING)) as responses:
        next(responses)
        assert engine._llm.llm_engine.has_unfinished_requests()
    assert not engine._llm.llm_engine.has_unfinished_requests()
    engine.load(policies[1], 1)
    engine.load(policies[0], 0)
    for one, other in zip(before, generate(engine, asked, SAMPLING), strict=True):
        np.testing.assert_array_equal(one.tokens_G, other.tokens_G)
        np.testing.assert_array_equal(one.routes.sets_TLK, other.routes.sets_TLK)


def test_reload_changes_weights_routes_and_prefix_cache(engine, policies, references):
    """After load(), tokens, routes and log-probs are those of the new weights, for prompts that
    the old policy had in the prefix cache; and the spans say so.
    """
    asked = requests(3)
    generate(engine, asked, SAMPLING)
    engine.load(policies[1], 7)
    generations = generate(engine, asked, SAMPLING)
    assert_agrees(references[1], asked, generations, TEMPERATURE)
    assert {span.version for g in generations for span in g.version_spans} == {7}
    engine.load(policies[0], 0)
    assert_agrees(references[0], asked, generate(engine, asked, SAMPLING), TEMPERATURE)


def test_without_the_reset_prompts_keep_the_old_routes(engine, policies, references, monkeypatch):
    """The guard is needed: with the reset left out, the routes of a prompt that was seen before
    are the old policy's, and nothing else says so. A reset that fails is an error.
    """
    asked = requests(4, lengths=(97,))
    generate(engine, asked, SAMPLING)
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
        engine.load(policies[1], 1)
        routes = generate(engine, asked[:1], SAMPLING)[0].routes
        old = references[0](np.array(asked[0].prompt_tokens)).sets_TLK
        np.testing.assert_array_equal(routes.sets_TLK[:96], old)
        patch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(RolloutError, match="prefix cache"):
            engine.load(policies[0], 2)
    engine.load(policies[0], 0)
    assert_agrees(references[0], asked, generate(engine, asked, SAMPLING), TEMPERATURE)


def test_without_the_repack_the_cpu_kernels_read_noise(engine, policies, references, monkeypatch):
    """The CPU adapter's repack is needed: without it the log-probs are not the new policy's."""
    asked = requests(5, lengths=(40,))
    with monkeypatch.context() as patch:
        patch.setattr(cpu_vllm, "repack_experts", lambda worker: None)
        engine.load(policies[1], 1)
        with pytest.raises(AssertionError):
            assert_agrees(references[1], asked, generate(engine, asked, SAMPLING), TEMPERATURE)
    engine.load(policies[0], 0)
    assert_agrees(references[0], asked, generate(engine, asked, SAMPLING), TEMPERATURE)


def test_greedy_sampling_of_a_validation(engine, references):
    """Temperature 0 takes the likeliest token each time."""
    asked = requests(6, lengths=(20, 50), group=1)
    for request, generation in zip(
        asked, generate(engine, asked, Sampling(0.0, 1.0, -1, 16)), strict=True
    ):
        tokens_S = np.concatenate([np.array(request.prompt_tokens), generation.tokens_G])
        logits_TV = references[0](tokens_S).logits_TV[-len(generation.tokens_G) :]
        np.testing.assert_array_equal(generation.tokens_G, logits_TV.argmax(-1).numpy())


def test_a_policy_that_lacks_tensors_is_refused(engine, tmp_path):
    """vLLM would keep the old values of what is missing, with a warning only."""
    other = make_tiny(tmp_path, "qwen3_moe_dense_first", num_hidden_layers=3)
    with pytest.raises(RolloutError, match=r"policy 9 lacks tensors .*layers\.3"):
        engine.load(other, 9)
    assert engine.version == 0


def test_another_geometry_is_refused(engine):
    """run.json and the engine's model must agree on which layers are MoE layers."""
    with pytest.raises(RolloutError, match="prepared for another model"):
        engine._check_geometry(Geometry(16, 4, (0, 1, 2, 3)))
