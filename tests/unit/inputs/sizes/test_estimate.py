"""What a run needs of memory: by hand where it is plain arithmetic, and what is refused."""

import time

import pytest

from pipeline.config.keys import with_value
from pipeline.errors import InputError
from pipeline.inputs.sizes.estimate import RUNTIME, estimate_memory
from pipeline.inputs.sizes.limit import memory_problems
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
    assert 3 * found["optimizer state"] == pytest.approx(2 * plain["optimizer state"])
    reduced = parts({"actor.megatron.override_ddp_config": {"grad_reduce_in_fp32": False}})
    assert 2 * reduced["gradients"] == plain["gradients"]
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}
    offloaded = parts({"actor.optim.override_optimizer_config": offload})
    assert 4 * offloaded["optimizer state"] == pytest.approx(plain["optimizer state"])
    for key in ("actor.megatron.param_offload", "ref.megatron.param_offload"):
        assert "reference policy" not in parts({key: True})


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


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * GIB), ("80GB", 80 * 10**9), ("79.5 gib", int(79.5 * GIB))]
)
def test_sizes_are_read(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["80", "GiB", "0GiB", "-1GB", "80GiB80", "80 MB", ""])
def test_other_sizes_are_refused(text):
    with pytest.raises(InputError, match=r"--gpu-memory: found .* write one like 80GiB"):
        parse_memory(text)


def test_what_does_not_fit_is_refused_with_its_largest_parts_and_what_helps():
    config = config_of(nodes=1, tp=4, ep=8)
    memory = estimate_memory(config, hf_config("qwen3-30b-a3b"))
    [problem] = memory_problems(config, memory, 80 * GIB)
    assert "largest: optimizer state 42.7 GiB, activations" in problem
    assert "recompute_granularity=full" in problem
    assert "ppo_max_token_len_per_gpu" in problem
    assert "trainer.nnodes" in problem
    assert memory_problems(config, memory, memory.training) == []
    assert memory_problems(config, memory, memory.training - 1) != []


def test_an_engine_that_does_not_fit_is_refused_too():
    config = config_of(nodes=16, tp=8, pp=16, ep=8, first=3, last=2, override=FULL)
    memory = estimate_memory(config, hf_config("deepseek-v3"))
    problems = memory_problems(config, memory, 180 * GIB)
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
