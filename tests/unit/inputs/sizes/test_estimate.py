"""The memory estimate of a run, compared with manual arithmetic, and the errors for large runs."""

import pytest

from pipeline.config.keys import with_value
from pipeline.inputs.sizes.estimate import RUNTIME, estimate_memory, tokens_of_micro_batch
from pipeline.inputs.sizes.limit import memory_problems
from pipeline.inputs.sizes.memory import GIB, memory_lines
from tests.large_models import FULL, LAYOUTS, config_of, hf_config

EXPERTS = 48 * 3 * 2048 * 768 * 128
DENSE = 30_532_122_624 - EXPERTS
WHOLE = 48 * (2 * 2048 + 2 * 128 + 2048 * 128) + 2048
"""Weights in the norms and routers of Qwen3-30B-A3B, which tensor parallelism does not split."""


def parts_of(memory):
    return {part.name: part.bytes for part in memory.parts}


def test_weights_gradients_and_optimizer_match_manual_arithmetic():
    """Weights, gradients and the optimizer's state take 2, 4 and 12 bytes per weight."""
    config = config_of(nodes=2, tp=4, ep=8, override=FULL)
    parts = parts_of(estimate_memory(config, hf_config("qwen3-30b-a3b")))
    dense, experts = (DENSE - WHOLE) // 4 + WHOLE, EXPERTS // 8
    assert parts["weights"] == 2 * (dense + experts)
    assert parts["gradients"] == 4 * (dense + experts)
    assert parts["optimizer state"] == 12 * (dense // 4 + experts // 2)


def test_options_of_megatron_save_memory():
    """In bfloat16, gradients and moments are half as large."""
    layout = {"nodes": 2, "tp": 4, "ep": 8, "override": FULL, "use_kl_loss": True}
    plain = parts_of(estimate_memory(config_of(**layout), hf_config("qwen3-30b-a3b")))

    def parts(values):
        config = config_of(**layout)
        for key, value in values.items():
            config = with_value(config, f"actor_rollout_ref.{key}", value)
        return parts_of(estimate_memory(config, hf_config("qwen3-30b-a3b")))

    small = {"optim.use_precision_aware_optimizer": True}
    small |= {f"optim.{name}_dtype": "bf16" for name in ("main_grads", "exp_avg", "exp_avg_sq")}
    found = parts({f"actor.{key}": value for key, value in small.items()})
    assert 2 * found["gradients"] == plain["gradients"]
    # For each weight: two moments of 2 bytes each, and the 2 extra bytes of float32 over bfloat16.
    assert 2 * found["optimizer state"] == pytest.approx(plain["optimizer state"])
    whole = {"store_param_remainders": False}
    found = parts(
        {f"actor.{key}": value for key, value in small.items()}
        | {"actor.optim.override_optimizer_config": whole}
    )
    assert 3 * found["optimizer state"] == pytest.approx(2 * plain["optimizer state"])
    reduced = parts({"actor.megatron.override_ddp_config": {"grad_reduce_in_fp32": False}})
    assert 2 * reduced["gradients"] == plain["gradients"]
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}
    offloaded = parts({"actor.optim.override_optimizer_config": offload})
    assert 4 * offloaded["optimizer state"] == pytest.approx(plain["optimizer state"])
    assert "reference policy" not in parts({"actor.megatron.param_offload": True})
    fullest = parts({"ref.megatron.param_offload": True})
    assert "log-prob pass of the reference" in fullest, "the policy stays on the GPU then"
    assert fullest["reference policy"] == fullest["weights"] == plain["weights"]


def test_recomputation_and_smaller_micro_batches_keep_fewer_activations():
    def activations(**how):
        memory = estimate_memory(config_of(nodes=2, tp=4, ep=8, **how), hf_config("qwen3-30b-a3b"))
        return parts_of(memory)["activations"]

    whole = activations()
    moe = activations(override={"recompute_granularity": "selective", "recompute_modules": ["moe"]})
    assert activations(override=FULL) < moe < whole
    hidden = 2048 * 2 * 16_384
    final_norm = 2 * hidden // 4 + hidden  # the loss also needs the gathered output of the norm
    assert activations(override=FULL) == 48 * hidden // 4 + final_norm
    assert activations(tokens=8192) == pytest.approx(whole / 2)


@pytest.mark.parametrize(("stages", "virtual"), [(4, None), (4, 3)])
def test_a_stage_keeps_the_micro_batches_of_later_stages(stages, virtual):
    """With 1F1B, a stage keeps one micro-batch for itself and one for each later stage."""
    config = config_of(nodes=1, pp=stages, vpp=virtual, ep=2, override=FULL)
    memory = estimate_memory(config, hf_config("qwen3-30b-a3b"))
    behind = stages - 1 - memory.stage
    in_flight = behind + 1 if virtual is None else (2 * behind + 2 * 4 + 1) / 3
    hidden = 2048 * 2 * 16_384
    final_norm = 0 if behind else 2 * hidden
    assert parts_of(memory)["activations"] == 12 * hidden * in_flight + final_norm


def with_values(config, values):
    for key, value in values.items():
        config = with_value(config, f"actor_rollout_ref.{key}", value)
    return config


def test_log_prob_passes_are_counted():
    """A log-prob pass with large micro-batches needs more memory than an update with small ones."""
    config = config_of(nodes=2, tp=4, ep=8, override=FULL)
    model = hf_config("qwen3-30b-a3b")
    large = with_values(config, {"rollout.log_prob_max_token_len_per_gpu": 1_000_000_000})
    assert tokens_of_micro_batch(large) == 16_384
    responses = config.actor_rollout_ref.actor.ppo_mini_batch_size * 8
    share = responses // 4 * 10_240
    assert tokens_of_micro_batch(large, "log_prob") == share
    memory, usual = estimate_memory(large, model), estimate_memory(config, model)
    parts = parts_of(memory)
    assert memory.training > usual.training
    assert parts["log-prob pass"] > share * 2048 * 2 * 8 // 4, "inputs of the experts at least"
    assert "activations" not in parts
    assert parts["gradients"] == parts_of(usual)["gradients"]
    offload = {"actor.megatron.grad_offload": True, "actor.megatron.optimizer_offload": True}
    less = estimate_memory(with_values(large, offload), model)
    saved = parts["gradients"] + parts["optimizer state"]
    assert less.training == max(memory.training - saved, usual.training)


def test_the_log_prob_pass_of_the_reference_is_counted():
    config = config_of(nodes=2, tp=4, ep=8, override=FULL, use_kl_loss=True)
    large = {"ref.log_prob_max_token_len_per_gpu": 1_000_000_000}
    model = hf_config("qwen3-30b-a3b")
    both = parts_of(estimate_memory(with_values(config, large), model))
    assert both["log-prob pass of the reference"] > 0
    assert both["reference policy"] == both["weights"]
    away = with_values(config, large | {"actor.megatron.param_offload": True})
    found = parts_of(estimate_memory(away, model))
    assert found["reference policy"] == both["weights"]
    assert "weights" not in found


def test_a_critic_needs_the_memory_of_a_second_trained_model():
    """Its value head replaces the output layer, which is separate from the embedding here."""
    config = config_of(nodes=2, tp=4, ep=8, override=FULL)
    with_critic = with_value(config, "algorithm.adv_estimator", "gae")
    model = hf_config("qwen3-30b-a3b")
    alone = parts_of(estimate_memory(config, model))
    both = parts_of(estimate_memory(with_critic, model))
    critic = {name: size for name, size in both.items() if "critic" in name}
    weights = alone["weights"] // 2 - 151_936 * 2048 // 4 + 2048
    assert critic["critic's weights"] == 2 * weights
    assert critic["critic's gradients"] == 4 * weights
    dense = weights - EXPERTS // 8
    assert critic["critic's optimizer state"] == pytest.approx(12 * (dense / 4 + EXPERTS / 8 / 2))
    assert not [name for name in alone if "critic" in name]


def test_engines_and_a_training_rank_may_have_to_share_a_gpu():
    config = with_value(
        config_of(nodes=2, tp=4, ep=8, override=FULL),
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        0.5,
    )
    memory = estimate_memory(config, hf_config("qwen3-30b-a3b"))
    assert memory_problems(config, memory, 4 * memory.training, 128, engines=1) == []
    [problem] = memory_problems(config, memory, 4 * memory.training, 128, engines=2)
    assert problem.startswith("actor_rollout_ref.rollout.gpu_memory_utilization: found 0.5, so ")
    assert problem.endswith("lower it to at most 0.37")
    assert memory_problems(config, memory, 4 * memory.training, 128) == []


def problem_of(config, limit, model="qwen3-30b-a3b"):
    [problem] = memory_problems(config, estimate_memory(config, hf_config(model)), limit, 128)
    return problem


def test_a_refusal_names_the_largest_parts_and_the_settings_that_help():
    config = config_of(nodes=1, tp=4, ep=8)
    memory = estimate_memory(config, hf_config("qwen3-30b-a3b"))
    problem = problem_of(config, 80 * GIB)
    assert "largest: optimizer state 42.7 GiB, activations" in problem
    for key in ("optimizer_cpu_offload", "recompute_granularity", "ppo_max_token_len_per_gpu"):
        assert key in problem
    assert problem.count("tensor_model_parallel_size") == 1
    assert "expert_model_parallel_size" not in problem, "all 8 GPUs already have different experts"
    assert memory_problems(config, memory, memory.training, 128) == []
    assert memory_problems(config, memory, memory.training - 1, 128) != []


def test_an_engine_that_does_not_fit_is_refused():
    config = config_of(nodes=16, tp=8, pp=16, ep=8, first=3, last=2, override=FULL)
    memory = estimate_memory(config, hf_config("deepseek-v3"))
    problems = memory_problems(config, memory, 180 * GIB, 256)
    assert [problem.partition(":")[0] for problem in problems] == [
        "actor_rollout_ref.rollout.tensor_model_parallel_size"
    ]


def test_older_weights_are_counted_if_a_step_needs_them():
    """Each rank keeps its own weights from the previous version: 8 times 7.5 GiB."""
    config, model = config_of(nodes=1, tp=4, ep=8, override=FULL), hf_config("qwen3-30b-a3b")
    config = with_value(config, "trainer.total_training_steps", 11)
    stale = with_value(config, "trainer.max_staleness", 1)
    memory = estimate_memory(stale, model)
    assert memory.host_older == 8 * parts_of(memory)["weights"]
    assert dict(memory_lines(memory))["host"].endswith(
        "on each training node, for a checkpoint, and 59.9 GiB for older weights"
    )
    short = with_value(stale, "trainer.total_training_steps", 10)
    for other in (config, short):
        assert estimate_memory(other, model).host_older == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_estimated(layout):
    model, settings = LAYOUTS[layout]
    memory = estimate_memory(config_of(**settings), hf_config(model))
    assert memory.training > RUNTIME
    cpu = estimate_memory(config_of(**settings), hf_config(model), local=True)
    assert cpu.local
    assert "CUDA" not in str(cpu.parts)
