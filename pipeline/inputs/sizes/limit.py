"""Whether a run fits into GPUs of a stated size, and what would help."""

from collections.abc import Sequence

from pipeline.config.tree import RunConfig
from pipeline.inputs.sizes.cut import cut_of
from pipeline.inputs.sizes.memory import Memory, MemoryPart, listed, shown

_MEGATRON = "actor_rollout_ref.actor.megatron"
_LARGEST = 3


def memory_problems(config: RunConfig, memory: Memory, limit: int) -> list[str]:
    """Why training ranks or engines do not fit into GPUs of `limit` bytes."""
    problems = []
    if memory.training > limit:
        problems.append(_training_problem(config, memory, limit))
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if memory.rollout > share * limit:
        key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
        problems.append(
            f"{key}: each GPU of an engine needs {shown(memory.rollout)} at least "
            f"({listed(memory.engine)}), but has {shown(round(share * limit))}: {share} "
            f"(gpu_memory_utilization) of {shown(limit)}; write more"
        )
    return problems


def _training_problem(config: RunConfig, memory: Memory, limit: int) -> str:
    parts = sorted(memory.parts, key=lambda part: -part.bytes)[:_LARGEST]
    stage = f", in pipeline stage {memory.stage}," if cut_of(config).pp > 1 else ""
    return (
        f"trainer: the fullest GPU{stage} needs about {shown(memory.training)}, but has "
        f"{shown(limit)}; largest: {listed(parts)}; what would help: "
        f"{'; '.join(_helping(config, parts))}"
    )


def _helping(config: RunConfig, parts: Sequence[MemoryPart]) -> list[str]:
    """Settings that make the largest parts smaller and are not used up yet."""
    actor, names = config.actor_rollout_ref.actor, {part.name for part in parts}
    override, cut = actor.megatron.override_transformer_config, cut_of(config)
    found = []
    if names & {"activations", "backward pass of a layer", "loss"}:
        if override.get("recompute_granularity") != "full":
            found.append(
                f"{_MEGATRON}.override_transformer_config.recompute_granularity=full with "
                "recompute_method=uniform and recompute_num_layers=1"
            )
        tokens = (
            "ppo_max_token_len_per_gpu"
            if actor.use_dynamic_bsz
            else ("ppo_micro_batch_size_per_gpu")
        )
        found.append(f"a smaller actor_rollout_ref.actor.{tokens}")
    if not actor.megatron.use_distributed_optimizer and cut.dense_copies > 1:
        found.append(f"{_MEGATRON}.use_distributed_optimizer=True")
    found.append(
        f"larger {_MEGATRON}.expert_model_parallel_size, pipeline_model_parallel_size or "
        "tensor_model_parallel_size"
    )
    found.append("more trainer.nnodes")
    return found
