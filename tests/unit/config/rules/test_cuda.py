"""Settings and models that a run on CPU cannot use are refused."""

import pytest
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from pipeline.config.rules.cuda import HEADS
from tests.unit.config.settings import (
    QWEN3,
    QWEN3_MOE,
    R3,
    REPLAY,
    ROLLOUT,
    problems,
    the_problem,
)

CPU = "trainer.device=cpu"
MIXTRAL = {key: value for key, value in QWEN3_MOE.items() if "moe" not in key} | {
    "model_type": "mixtral",
    "num_local_experts": 8,
}


@pytest.mark.parametrize(
    ("model", "settings", "value"),
    [
        (QWEN3_MOE | {"moe_intermediate_size": 16}, (), "moe_intermediate_size=16"),
        (QWEN3_MOE | {"hidden_size": 48}, (), "hidden_size=48"),
        (MIXTRAL | {"intermediate_size": 112}, (), "intermediate_size=112"),
    ],
)
def test_experts_that_the_cpu_engine_cannot_compute_are_refused(tmp_path, model, settings, value):
    """vLLM's CPU build refuses these experts, or pads them and then cannot load a later policy. On
    GPUs, they are accepted."""
    assert the_problem(tmp_path, CPU, *settings, model=model) == (
        f"actor_rollout_ref.model.path: config.json has {value}, but vLLM's CPU kernels for "
        "experts require a multiple of 32; use another model, or GPUs"
    )
    assert problems(tmp_path, *settings, model=model) == []


@pytest.mark.parametrize("size", [16, 48, 144, 288])
def test_head_sizes_that_the_cpu_engine_cannot_compute_are_refused(tmp_path, size):
    """The engine would start, and fail in its first forward pass. A dense model is checked too."""
    for model in (QWEN3_MOE, QWEN3):
        settings = () if model is QWEN3 else R3
        found = the_problem(tmp_path, CPU, *settings, model=model | {"head_dim": size})
        assert (
            f"a head size (head_dim, or hidden_size / num_attention_heads) of {size}, but" in found
        )
        assert problems(tmp_path, CPU, *settings, model=model | {"head_dim": 96}) == []
        assert problems(tmp_path, *settings, model=model | {"head_dim": size}) == []


def test_the_head_sizes_are_those_of_vllm():
    assert CPUAttentionBackend.get_supported_head_sizes() == list(HEADS)
    assert CPUMLABackend.get_supported_head_sizes() == [512 + 64]


def test_latent_attention_on_the_cpu_has_one_size(tmp_path):
    latent = {"kv_lora_rank": 256, "qk_rope_head_dim": 64, "v_head_dim": 32, "head_dim": 64}
    found = the_problem(tmp_path, CPU, model=QWEN3_MOE | latent)
    assert "has kv_lora_rank=256 and qk_rope_head_dim=64, but" in found
    assert "only kv_lora_rank=512 and qk_rope_head_dim=64" in found
    assert problems(tmp_path, CPU, model=QWEN3_MOE | latent | {"kv_lora_rank": 512}) == []


def test_an_engine_on_the_cpu_is_one_process(tmp_path):
    found = the_problem(tmp_path, CPU, f"{ROLLOUT}.tensor_model_parallel_size=2", model=QWEN3_MOE)
    assert found.startswith(f"{ROLLOUT}.tensor_model_parallel_size: found 2, expected 1 on CPU")


def test_runs_in_which_no_engine_computes_experts_are_accepted(tmp_path):
    """A dense model has no experts, and a run that replays a recorded set has no engine."""
    dense = QWEN3 | {"hidden_size": 48, "intermediate_size": 16}
    assert problems(tmp_path, CPU, model=dense) == []
    replay = (*R3, f"{REPLAY}.replay_file={tmp_path}/set")
    narrow = QWEN3_MOE | {"moe_intermediate_size": 16}
    assert problems(tmp_path, CPU, *replay, model=narrow) == []
