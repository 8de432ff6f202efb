"""The check that a run fits on GPUs of a given size, and advice if it does not."""

import math
from collections.abc import Collection, Iterator

from pipeline.config.rules.budget import Pass, budget
from pipeline.config.rules.precision import precision_aware
from pipeline.config.tree import RunConfig
from pipeline.inputs.sizes.cut import cut_of
from pipeline.inputs.sizes.estimate import CRITIC, LOG_PROB_PARTS, RUNTIME, RUNTIME_PART
from pipeline.inputs.sizes.memory import Memory, listed, shown

_ACTOR = "actor_rollout_ref.actor"
_MEGATRON = f"{_ACTOR}.megatron"
_OPTIM = f"{_ACTOR}.optim"
_SECTIONS: dict[Pass, str] = {
    "update": f"{_ACTOR}.ppo",
    "log_prob": "actor_rollout_ref.rollout.log_prob",
    "reference": "actor_rollout_ref.ref.log_prob",
    "critic_update": "critic.ppo",
    "values": "critic.forward",
}
"""Prefixes of the settings for a pass's micro-batches."""
_OFFLOADS = {
    "weights": "param_offload",
    "gradients": "grad_offload",
    "optimizer state": "optimizer_offload",
}
_LARGEST = 3


def memory_problems(
    config: RunConfig, memory: Memory, limit: int, experts: int, engines: int = 0
) -> list[str]:
    """Return the reasons why training ranks or engines do not fit on GPUs of a given size.

    Args:
        config: Settings of the run.
        memory: The estimate for GPUs.
        limit: The memory of a GPU in bytes.
        experts: Number of experts in each MoE layer; 0 for a dense model.
        engines: Number of engines that share the training rank's GPU; 0 if they have their own.
    """
    problems = []
    if memory.training > limit:
        problems.append(_training_problem(config, memory, limit, experts))
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    reserved = round(engines * share * limit)
    if engines and memory.training <= limit < memory.training + reserved:
        problems.append(
            f"actor_rollout_ref.rollout.gpu_memory_utilization: found {share}, so the engines "
            f"reserve {shown(reserved)} of the {shown(limit)} of a GPU that they share with a "
            f"training rank, which needs about {shown(memory.training)}; lower it to at most "
            f"{_floor((limit - memory.training) / engines / limit)}"
        )
    if memory.rollout > share * limit:
        key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
        problems.append(
            f"{key}: each GPU of an engine needs at least {shown(memory.rollout)} "
            f"({listed(memory.engine)}), but has {shown(round(share * limit))}: {share} "
            f"(gpu_memory_utilization) of {shown(limit)}; increase this setting"
        )
    return problems


def _floor(share: float) -> float:
    return math.floor(100 * share) / 100


def _training_problem(config: RunConfig, memory: Memory, limit: int, experts: int) -> str:
    parts = sorted(memory.parts, key=lambda part: -part.bytes)
    stage = f", in pipeline stage {memory.stage}," if cut_of(config).pp > 1 else ""
    found = (
        f"trainer: the fullest GPU{stage} needs about {shown(memory.training)}, but has "
        f"{shown(limit)}; largest: {listed(parts[:_LARGEST])}; "
    )
    if limit <= RUNTIME:
        return (
            f"{found}no layout fits, because CUDA, NCCL and fragments are assumed to need "
            f"{shown(RUNTIME)}; use larger GPUs"
        )
    tensors = [part.name for part in parts if part.name != RUNTIME_PART]
    help_by_part = [
        what
        for name in tensors[:_LARGEST]
        for what in memory_settings(config, name, experts, tensors)
    ]
    offers = dict.fromkeys([*help_by_part, "more trainer.nnodes"])
    return f"{found}possible fixes: {'; '.join(offers)}"


def memory_settings(
    config: RunConfig, part: str, experts: int, parts: Collection[str]
) -> Iterator[str]:
    """Yield changes to settings that would make a part of the memory smaller.

    Settings that are already at their limit are omitted.

    Args:
        config: Settings of the run.
        part: Name of the part.
        experts: Number of experts in each MoE layer; 0 for a dense model.
        parts: Names of all parts at the peak. They show whether the peak is in a forward pass.
    """
    if part in ("weights", "gradients", "optimizer state", "reference policy"):
        megatron = config.actor_rollout_ref.actor.megatron
        if part == "reference policy" and not megatron.param_offload:
            yield f"{_MEGATRON}.param_offload=True"
        if set(LOG_PROB_PARTS.values()) & set(parts):  # the peak is in a forward pass
            if part == "gradients":
                yield f"{_MEGATRON}.grad_offload=True"
            if part == "optimizer state":
                yield f"{_MEGATRON}.optimizer_offload=True"
        if part == "gradients" and not _small_gradients(config):
            yield f"{_OPTIM}.main_grads_dtype=bf16 with use_precision_aware_optimizer=True"
        if part == "optimizer state":
            yield from _smaller_state(config)
        yield from _larger_layout(config, experts)
        return
    of_critic = part.removeprefix(CRITIC)
    if of_critic in _OFFLOADS and part != of_critic:
        yield f"critic.megatron.{_OFFLOADS[of_critic]}=True"
        yield from _larger_layout(config, experts)
        return
    override = config.actor_rollout_ref.actor.megatron.override_transformer_config
    of_log_probs = [of for of, name in LOG_PROB_PARTS.items() if name == part]
    if not of_log_probs and override.get("recompute_granularity") != "full":
        yield (
            f"{_MEGATRON}.override_transformer_config.recompute_granularity=full with "
            "recompute_method=uniform and recompute_num_layers=1"
        )
    of_updates: Pass = "update" if part == of_critic else "critic_update"
    yield from _fewer_tokens(config, of_log_probs[0] if of_log_probs else of_updates)
    yield from _larger_layout(config, experts)


def _small_gradients(config: RunConfig) -> bool:
    actor = config.actor_rollout_ref.actor
    if actor.megatron.dtype == "float32":  # no setting makes these gradients smaller
        return True
    if precision_aware(actor):
        return actor.optim.main_grads_dtype == "bf16"
    return not actor.megatron.override_ddp_config.get("grad_reduce_in_fp32", True)


def _smaller_state(config: RunConfig) -> Iterator[str]:
    actor, cut = config.actor_rollout_ref.actor, cut_of(config)
    if not actor.megatron.use_distributed_optimizer and cut.dense_copies > 1:
        yield f"{_MEGATRON}.use_distributed_optimizer=True"
    optim = actor.optim
    moments = {optim.exp_avg_dtype, optim.exp_avg_sq_dtype}
    smallest = precision_aware(actor) and moments == {"bf16"}
    if actor.megatron.dtype == "bfloat16" and not smallest:
        yield (
            f"{_OPTIM}.use_precision_aware_optimizer=True with exp_avg_dtype=bf16 and "
            "exp_avg_sq_dtype=bf16"
        )
    override = optim.override_optimizer_config
    offloads = override.get("optimizer_cpu_offload", False)
    if not offloads or override.get("optimizer_offload_fraction", 0) < 1:
        yield (
            f"{_OPTIM}.override_optimizer_config.optimizer_cpu_offload=True with "
            "optimizer_offload_fraction=1.0"
        )


def _fewer_tokens(config: RunConfig, of: Pass) -> Iterator[str]:
    """Yield changes to settings that put fewer tokens on each rank at a time.

    A micro-batch may be made smaller, but must be large enough for the longest sample. Context
    parallelism splits that sample over several ranks.
    """
    limits, ranks = budget(config, of), cut_of(config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    section = _SECTIONS[of]
    dynamic = limits.tokens is not None
    key = f"{section}_{'max_token_len' if dynamic else 'micro_batch_size'}_per_gpu"
    if (limits.tokens or 0) > longest or (limits.samples or 0) > 1:
        yield f"a smaller {key}"
    if ranks.ranks > ranks.tp * ranks.pp * ranks.cp:
        smaller = f" with a smaller {key}" if dynamic else ""
        yield f"a larger {_MEGATRON}.context_parallel_size{smaller}"


def _larger_layout(config: RunConfig, experts: int) -> Iterator[str]:
    """Yield the parallel sizes that can be increased with this number of ranks."""
    cut = cut_of(config)
    sizes = []
    if experts > cut.ep and cut.expert_copies > 1:
        sizes.append("expert_model_parallel_size")
    if cut.ranks > cut.tp * cut.pp * cut.cp:
        sizes += ["pipeline_model_parallel_size", "tensor_model_parallel_size"]
    if sizes:
        yield f"a larger {_MEGATRON}.{' or '.join(sizes)}"
