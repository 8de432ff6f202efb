"""What a run on CPU cannot have."""

import pytest

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
    ("model", "settings", "says"),
    [
        (QWEN3_MOE | {"moe_intermediate_size": 16}, (), "moe_intermediate_size=16"),
        (QWEN3_MOE | {"hidden_size": 48}, (), "hidden_size=48"),
        (MIXTRAL | {"intermediate_size": 112}, (), "intermediate_size=112"),
    ],
)
def test_experts_that_the_engine_cannot_compute(tmp_path, model, settings, says):
    """vLLM's CPU build refuses them, or pads them and loads no later policy; GPUs take them."""
    assert the_problem(tmp_path, CPU, *settings, model=model) == (
        f"actor_rollout_ref.model.path: config.json has {says}, but vLLM's kernels of experts on "
        "CPU need a multiple of 32; use another model, or GPUs"
    )
    assert problems(tmp_path, *settings, model=model) == []


def test_experts_that_are_cut(tmp_path):
    tp = f"{ROLLOUT}.tensor_model_parallel_size=2"
    found = the_problem(tmp_path, CPU, tp)
    assert "moe_intermediate_size=32, but" in found
    assert "a multiple of 64 (32 times rollout.tensor_model_parallel_size=2)" in found
    wide = QWEN3_MOE | {"moe_intermediate_size": 64}
    assert problems(tmp_path, CPU, tp, model=wide) == []
    whole = f"{ROLLOUT}.engine_kwargs.vllm.enable_expert_parallel=True"
    assert problems(tmp_path, CPU, tp, whole) == []


def test_models_without_such_experts(tmp_path):
    """A dense model has none, and a run that replays has no engine."""
    dense = QWEN3 | {"hidden_size": 48, "intermediate_size": 16}
    assert problems(tmp_path, CPU, model=dense) == []
    replay = (*R3, f"{REPLAY}.replay_file={tmp_path}/set")
    narrow = QWEN3_MOE | {"moe_intermediate_size": 16}
    assert problems(tmp_path, CPU, *replay, model=narrow) == []
