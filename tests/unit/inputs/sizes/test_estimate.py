"""What a run needs of memory: by hand where it is plain arithmetic, and what is refused."""

import time

import pytest

from pipeline.config.keys import with_value
from pipeline.errors import InputError
from pipeline.inputs.sizes.estimate import RUNTIME, estimate_memory, tokens_of_micro_batch
from pipeline.inputs.sizes.limit import memory_problems, memory_settings
from pipeline.inputs.sizes.memory import GIB, memory_lines, parse_memory
from tests.large_models import FULL, LAYOUTS, config_of, hf_config

EXPERTS = 48 * 3 * 2048 * 768 * 128
DENSE = 30_532_122_624 - EXPERTS
WHOLE = 48 * (2 * 2048 + 2 * 128 + 2048 * 128) + 2048
"""Norms and routers of Qwen3-30B-A3B, which tensor parallelism does not cut."""


def parts_of(memory):
    return {part.name: part.bytes for part in memory.parts}


def test_weights_gradients_and_optimizer_by_hand():
    """Qwen3-30B-A3B on 16 GPUs, TP4 EP8: 2, 4 and 12 bytes; of dense weights 4 copies share the
    optimizer's state, of experts 2."""
    config = config_of(nodes=2, tp=4, ep=8, override=FULL)
    parts = parts_of(estimate_memory(config, hf_config("qwen3-30b-a3b")))
    dense, experts = (DENSE - WHOLE) // 4 + WHOLE, EXPERTS // 8
    assert parts["weights"] == 2 * (dense + experts)
    assert parts["gradients"] == 4 * (dense + experts)
    assert parts["optimizer state"] == 12 * (dense // 4 + experts // 2)


def test_float32_has_no_second_copy_and_a_reference_has_weights():
    layout = {"nodes": 2, "tp": 4, "ep": 8, "override": FULL}
    config = config_of(**layout, use_kl_loss=True, dtype="float32")
    parts = parts_of(estimate_memory(config, hf_config("qwen3-30b-a3b")))
    other = parts_of(estimate_memory(config_of(**layout), hf_config("qwen3-30b-a3b")))
    assert parts["weights"] == parts["reference policy"] == 2 * other["weights"]
    assert 3 * parts["optimizer state"] == pytest.approx(2 * other["optimizer state"])


def test_what_options_of_megatron_save():
    """Half of the gradients and moments in bfloat16, three quarters of the state and the reference
    on the host."""
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
    # Moments of 2 bytes each, and the half of the float32 weight that the bfloat16 one lacks.
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
    assert "log-prob pass of the reference" in fullest, "there the policy stays beside it"
    assert fullest["reference policy"] == fullest["weights"] == plain["weights"]


def test_recomputation_and_fewer_tokens_keep_less():
    def activations(**how):
        memory = estimate_memory(config_of(nodes=2, tp=4, ep=8, **how), hf_config("qwen3-30b-a3b"))
        return parts_of(memory)["activations"]

    whole = activations()
    moe = activations(override={"recompute_granularity": "selective", "recompute_modules": ["moe"]})
    assert activations(override=FULL) < moe < whole
    hidden = 2048 * 2 * 16_384
    final_norm = 2 * hidden // 4 + hidden  # its output also gathered, for the loss
    assert activations(override=FULL) == 48 * hidden // 4 + final_norm
    assert activations(tokens=8192) == pytest.approx(whole / 2)


@pytest.mark.parametrize(("stages", "virtual"), [(4, None), (4, 3)])
def test_a_stage_keeps_the_micro_batches_of_those_behind_it(stages, virtual):
    """1F1B: one for each stage from here on; interleaved: more, of smaller chunks."""
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
    """Large micro-batches of forward passes hold more than updates of small ones; what updates
    alone need may be away. They are no larger than a mini-batch's share."""
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


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * GIB), ("80GB", 80 * 10**9), ("79.5 gib", int(79.5 * GIB))]
)
def test_sizes_are_read(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["80", "GiB", "0GiB", "-1GB", "80GiB80", "80 MB", ""])
def test_other_sizes_are_refused(text):
    with pytest.raises(InputError, match=r"--gpu-memory: found .* write one like 80GiB"):
        parse_memory(text)


def problem_of(config, limit, model="qwen3-30b-a3b"):
    [problem] = memory_problems(config, estimate_memory(config, hf_config(model)), limit, 128)
    return problem


def test_what_does_not_fit_is_refused_with_its_largest_parts_and_what_helps():
    config = config_of(nodes=1, tp=4, ep=8)
    memory = estimate_memory(config, hf_config("qwen3-30b-a3b"))
    problem = problem_of(config, 80 * GIB)
    assert "largest: optimizer state 42.7 GiB, activations" in problem
    for what in (
        "optim.use_precision_aware_optimizer=True with exp_avg_dtype=bf16",
        "optimizer_cpu_offload=True with optimizer_offload_fraction=1.0",
        "recompute_granularity=full",
        "a smaller actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "context_parallel_size with a smaller actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "main_grads_dtype=bf16",
        "megatron.pipeline_model_parallel_size or tensor_model_parallel_size",
        "trainer.nnodes",
    ):
        assert what in problem
    assert problem.count("tensor_model_parallel_size") == 1
    assert "expert_model_parallel_size" not in problem, "all 8 GPUs hold other experts"
    assert memory_problems(config, memory, memory.training, 128) == []
    assert memory_problems(config, memory, memory.training - 1, 128) != []


def test_no_size_is_offered_for_which_there_are_no_ranks():
    config = config_of(nodes=1, tp=8, ep=1)
    assert "parallel_size" not in problem_of(config, 30 * GIB)


def test_no_layout_fits_where_the_runtime_alone_does_not():
    config = config_of(nodes=16, ep=8)
    memory = estimate_memory(config, hf_config("qwen3-30b-a3b"))
    problem = memory_problems(config, memory, 4 * GIB, 128)[0]
    assert problem.endswith(
        "no layout fits: 4.0 GiB are assumed for CUDA, NCCL and fragments alone; use larger GPUs"
    )
    assert "would help" not in problem


def test_what_helps_a_log_prob_pass():
    config = config_of(nodes=2, tp=4, ep=8, override=FULL)
    large = with_values(config, {"rollout.log_prob_max_token_len_per_gpu": 1_000_000_000})
    problem = problem_of(large, 48 * GIB)
    assert "a smaller actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu" in problem
    assert "megatron.optimizer_offload=True" in problem
    assert "recompute" not in problem
    assert "ppo_max_token_len" not in problem


def test_what_helps_a_run_with_a_reference():
    config = config_of(nodes=2, tp=4, ep=8, override=FULL, use_kl_loss=True)
    away = with_values(config, {"ref.megatron.param_offload": True})
    for one in (config, away):
        memory = estimate_memory(one, hf_config("qwen3-30b-a3b"))
        names = {part.name for part in memory.parts}
        assert "reference policy" in names
        found = "; ".join(memory_settings(one, "reference policy", 128, names))
        assert "actor_rollout_ref.actor.megatron.param_offload=True" in found


def test_an_engine_that_does_not_fit_is_refused_too():
    config = config_of(nodes=16, tp=8, pp=16, ep=8, first=3, last=2, override=FULL)
    memory = estimate_memory(config, hf_config("deepseek-v3"))
    problems = memory_problems(config, memory, 180 * GIB, 256)
    assert [problem.partition(":")[0] for problem in problems] == [
        "actor_rollout_ref.rollout.tensor_model_parallel_size"
    ]


def test_what_is_printed():
    config = config_of(nodes=1, tp=4, ep=8, override=FULL)
    lines = memory_lines(estimate_memory(config, hf_config("qwen3-30b-a3b")))
    assert lines[0][0] == "memory"
    text = " ".join(text for _, text in lines)
    assert "of the fullest training GPU: weights 7.5 GiB, gradients 15.0 GiB" in text
    assert "of a training node for a checkpoint" in text
    assert "of an engine: weights 7.1 GiB" in text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_estimated_at_once(layout):
    """Also the largest model needs no more than the config: 2 s were asked for, 0.1 s is plenty."""
    model, settings = LAYOUTS[layout]
    start = time.process_time()
    memory = estimate_memory(config_of(**settings), hf_config(model))
    assert time.process_time() - start < 0.1
    assert memory.training > RUNTIME
    cpu = estimate_memory(config_of(**settings), hf_config(model), local=True)
    assert cpu.local
    assert "CUDA" not in str(cpu.parts)
