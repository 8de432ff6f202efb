"""Settings and models that a run on CPU cannot use are refused."""

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


def test_the_width_of_experts_is_checked_after_the_split_by_tensor_parallelism(tmp_path):
    tp = f"{ROLLOUT}.tensor_model_parallel_size=2"
    found = the_problem(tmp_path, CPU, tp)
    assert "moe_intermediate_size=32, but" in found
    assert "a multiple of 64 (32 times rollout.tensor_model_parallel_size=2)" in found
    wide = QWEN3_MOE | {"moe_intermediate_size": 64}
    assert problems(tmp_path, CPU, tp, model=wide) == []
    whole = f"{ROLLOUT}.engine_kwargs.vllm.enable_expert_parallel=True"
    assert problems(tmp_path, CPU, tp, whole) == []


def test_runs_in_which_no_engine_computes_experts_are_accepted(tmp_path):
    """A dense model has no experts, and a run that replays a recorded set has no engine."""
    dense = QWEN3 | {"hidden_size": 48, "intermediate_size": 16}
    assert problems(tmp_path, CPU, model=dense) == []
    replay = (*R3, f"{REPLAY}.replay_file={tmp_path}/set")
    narrow = QWEN3_MOE | {"moe_intermediate_size": 16}
    assert problems(tmp_path, CPU, *replay, model=narrow) == []
