"""The engine compared with an independent forward pass: routes, log-probs and reloading."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from operators.rollout.engine import RolloutEngine, _sampling_params, is_eager
from operators.rollout.types import Request, RolloutError
from operators.rollout.vllm_environment import prepare_environment
from pipeline import progress
from pipeline.config.tree import Rollout
from pipeline.hardware import gpu_pool
from pipeline.progress import read_progress
from pipeline.run.plan import Sampling
from pipeline.traces import Geometry, VersionSpan
from tests.integration.rollout.agreement import assert_agrees
from tests.integration.rollout.generations import assert_same, generate
from tests.integration.rollout.mixed import NAME, mixed_policy
from tests.integration.rollout.reference import ReferenceModel
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.integration

GEOMETRY = Geometry(16, 4, (1, 2, 3))
TEMPERATURE = 0.7
SAMPLING = Sampling(TEMPERATURE, 1.0, -1, 80)
FEW_BLOCKS = {"num_gpu_blocks_override": 20, "block_size": 32}
"""A KV cache that is too small for a full batch. vLLM reads both arguments on CPU and GPU."""
SETTINGS = Rollout(
    dtype="float32",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    engine_kwargs={"vllm": FEW_BLOCKS},
)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Make two policies for one model whose first layer is dense.

    Their tokenizer_config.json names a class of another family, and is the only file with an end
    token.
    """
    root = tmp_path_factory.mktemp("policies")
    folders = [make_tiny(root / str(i), "qwen3_moe_dense_first", seed=i) for i in range(2)]
    for folder in folders:
        set_in(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
        set_in(folder / "config.json", eos_token_id=None)
        set_in(folder / "generation_config.json", eos_token_id=None)
    return folders


def set_in(path: Path, **values: object) -> None:
    """Set values in a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def references(policies):
    return [ReferenceModel(folder) for folder in policies]


class Witness:
    """Counts events inside the engine without changing its behaviour."""

    preemptions = 0
    cached_tokens = 0


@pytest.fixture(scope="module")
def witness():
    return Witness()


@pytest.fixture(scope="module")
def engine(policies, witness):
    """Start one engine for the module, with a KV cache that is too small for a full batch."""
    prepare_environment(is_eager(SETTINGS))
    patch = pytest.MonkeyPatch()
    # On GPUs, Triton would round the factors of float32 products to TF32.
    patch.setenv("TRITON_F32_DEFAULT", "ieee")
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt = Scheduler._preempt_request  # the schedulers of both builds inherit this method

    def counted(scheduler, *args, **kwargs):
        witness.preemptions += 1
        return preempt(scheduler, *args, **kwargs)

    finished = RolloutEngine._finished

    def seen(self, request, output):
        witness.cached_tokens += output.num_cached_tokens
        return finished(self, request, output)

    patch.setattr(Scheduler, "_preempt_request", counted)
    patch.setattr(RolloutEngine, "_finished", seen)
    engine = RolloutEngine(policies[0], SETTINGS, True, 256, GEOMETRY)
    yield engine
    engine.close()
    patch.undo()


@pytest.fixture
def cpu_adapter():
    """Return the module that adapts vLLM's CPU build; the GPU build has no such module."""
    if gpu_pool():
        pytest.skip("only the CPU build repacks experts")
    from operators.cpu import vllm_build

    return vllm_build


def requests(seed: int, lengths=(100, 1, 70, 33), group: int = 4) -> list[Request]:
    """Return groups of requests that share a prompt.

    Args:
        seed: Seed for the prompts and the requests.
        lengths: The length of each group's prompt, in tokens; some exceed the engine's batch.
        group: The number of requests per prompt.
    """
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(2, 300, length).tolist()) for length in lengths]
    return [
        Request(f"{seed:06d}/{p}/{k}", prompt, 1000 * seed + 10 * p + k)
        for p, prompt in enumerate(prompts)
        for k in range(group)
    ]


def test_routes_and_logprobs_equal_an_independent_forward(engine, references, witness):
    """The routes of all rows equal the top-k of transformers' routers on the same tokens.

    The requests cover everything that could lose or shift rows. Groups share a prompt (prefix hits
    within and between calls), some prompts are longer than the batch (chunked prefill), and the
    KV cache is too small for all sequences (preemption). Log-probs use the sampling temperature.
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
        assert 0 not in generation.tokens_G[:-1]


def test_a_sample_depends_only_on_its_seed(engine):
    """The samples of a group differ, and a request that is repeated alone gets the same tokens.

    When the request was sent for the first time, its prompt was computed in chunks, in a batch with
    other requests.
    """
    asked = requests(2, lengths=(90, 40))
    generations = generate(engine, asked, SAMPLING)
    assert len({generation.tokens_G.tobytes() for generation in generations}) == len(asked)
    [alone] = generate(engine, asked[2:3], SAMPLING)
    np.testing.assert_array_equal(alone.tokens_G, generations[2].tokens_G)


def test_rewards_get_the_text_of_the_trace_without_special_tokens(engine, policies):
    tokenizer = Tokenizer.from_file(str(policies[0] / "tokenizer.json"))
    tokens = [*tokenizer.encode("2+7=9 3 +8 , \u00e9").ids, 0]
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "2+7=9 3 +8 , \u00e9<|end|>"
    assert engine.text(np.array(tokens, np.uint32)) == "2+7=9 3 +8 , \u00e9"


def test_responses_are_yielded_as_they_finish(engine):
    """Responses are yielded in any order, while other responses are still being generated.

    Their tokens are the same as from vLLM's own `generate` with the same seeds.
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
        [_sampling_params(request, SAMPLING, [0]) for request in asked],
        use_tqdm=False,
    )
    assert [found[request.id] for request in asked] == [o.outputs[0].token_ids for o in outputs]


def test_the_display_shows_the_progress_of_generation(engine, tmp_path, monkeypatch):
    """The token rate is shown during generation, before any sample has finished."""
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


def test_closing_the_iterator_aborts_the_unfinished_requests(engine, policies):
    """After the abort, the engine can load a new policy, and later generates the same samples."""
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
    """After load(), tokens, routes and log-probs come from the new weights.

    This includes prompts that are in the old policy's prefix cache. The version spans name the new
    version.
    """
    asked = requests(3)
    generate(engine, asked, SAMPLING)
    engine.load(policies[1], 7)
    generations = generate(engine, asked, SAMPLING)
    assert_agrees(references[1], asked, generations, TEMPERATURE)
    assert {span.version for g in generations for span in g.version_spans} == {7}
    engine.load(policies[0], 0)
    assert_agrees(references[0], asked, generate(engine, asked, SAMPLING), TEMPERATURE)


def test_only_changed_tensors_are_loaded(
    engine, policies, references, tmp_path, monkeypatch, cpu_adapter
):
    """Loading some tensors of two layers and the last norm gives the same result as a full reload.

    The experts of other layers are not repacked. The engine does not read the files after the load,
    because the next version is patched into them.
    """
    asked = requests(8, lengths=(60, 33))
    takes = ("layers.2.self_attn.q_proj", "layers.3.mlp.experts.5.up_proj", "model.norm")
    folder, changed = mixed_policy(
        tmp_path / "mixed", *policies, lambda name: any(part in name for part in takes)
    )
    repacked = []
    repack = cpu_adapter.repack_experts

    def noted(worker, layers):
        repacked.append(set(layers))
        repack(worker, layers)

    monkeypatch.setattr(cpu_adapter, "repack_experts", noted)
    engine.load(folder, 1, changed)
    data = bytearray((folder / NAME).read_bytes())
    with (folder / NAME).open("r+b") as file:
        file.write(data[:-4096] + bytes(4096))
    in_part = generate(engine, asked, SAMPLING)
    (folder / NAME).write_bytes(data)
    assert_agrees(ReferenceModel(folder), asked, in_part, TEMPERATURE)
    engine.load(folder, 1)
    assert_same(in_part, generate(engine, asked, SAMPLING))
    engine.load(folder, 2, ())
    assert_same(in_part, generate(engine, asked, SAMPLING))
    assert repacked == [{2, 3}, {0, 1, 2, 3}, set()]
    engine.load(policies[0], 0, changed)
    assert_agrees(references[0], asked, generate(engine, asked, SAMPLING), TEMPERATURE)


def test_without_the_reset_prompts_keep_the_old_routes(engine, policies, references, monkeypatch):
    """Without the reset, a cached prompt silently keeps the old policy's routes.

    The engine therefore resets the prefix cache, and a failed reset raises an error.
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


def test_without_the_repack_the_cpu_kernels_read_noise(
    engine, policies, references, monkeypatch, cpu_adapter
):
    """Without the CPU adapter's repack, the log-probs are not the new policy's."""
    asked = requests(5, lengths=(40,))
    with monkeypatch.context() as patch:
        patch.setattr(cpu_adapter, "repack_experts", lambda worker, layers: None)
        engine.load(policies[1], 1)
        with pytest.raises(AssertionError):
            assert_agrees(references[1], asked, generate(engine, asked, SAMPLING), TEMPERATURE)
    engine.load(policies[0], 0)
    assert_agrees(references[0], asked, generate(engine, asked, SAMPLING), TEMPERATURE)


def test_a_validation_samples_greedily(engine, references):
    """At temperature 0, the engine takes the most likely token at each position."""
    asked = requests(6, lengths=(20, 50), group=1)
    for request, generation in zip(
        asked, generate(engine, asked, Sampling(0.0, 1.0, -1, 16)), strict=True
    ):
        tokens_S = np.concatenate([np.array(request.prompt_tokens), generation.tokens_G])
        logits_TV = references[0](tokens_S).logits_TV[-len(generation.tokens_G) :]
        np.testing.assert_array_equal(generation.tokens_G, logits_TV.argmax(-1).numpy())


def test_a_policy_that_lacks_tensors_is_refused(engine, tmp_path):
    """vLLM would keep the old values of missing tensors, and would only warn."""
    other = make_tiny(tmp_path, "qwen3_moe_dense_first", num_hidden_layers=3)
    with pytest.raises(RolloutError, match=r"policy 9 lacks the tensors .*layers\.3"):
        engine.load(other, 9)
    assert engine.version == 0


def test_a_different_geometry_is_refused(engine):
    """run.json and the engine's model must agree on which layers are MoE layers."""
    with pytest.raises(RolloutError, match="prepared for a different model"):
        engine._check_geometry(Geometry(16, 4, (0, 1, 2, 3)))
