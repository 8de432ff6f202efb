"""Parallel sizes against each other, against the number of ranks and against the model."""

from collections.abc import Mapping
from typing import Any

from pipeline.config.model import MoeGeometry
from pipeline.config.override_rules import override_problems
from pipeline.config.tree import Megatron, RunConfig

_MEGATRON = "actor_rollout_ref.actor.megatron"
_OVERRIDE = f"{_MEGATRON}.override_transformer_config"
_TP = f"{_MEGATRON}.tensor_model_parallel_size"
_PP = f"{_MEGATRON}.pipeline_model_parallel_size"
_VPP = f"{_MEGATRON}.virtual_pipeline_model_parallel_size"
_EP = f"{_MEGATRON}.expert_model_parallel_size"
_ETP = f"{_MEGATRON}.expert_tensor_parallel_size"

_OURS = {
    "tensor_model_parallel_size": _TP,
    "pipeline_model_parallel_size": _PP,
    "virtual_pipeline_model_parallel_size": _VPP,
    "context_parallel_size": f"{_MEGATRON}.context_parallel_size",
    "expert_model_parallel_size": _EP,
    "expert_tensor_parallel_size": _ETP,
    "sequence_parallel": f"{_MEGATRON}.sequence_parallel",
    "params_dtype": f"{_MEGATRON}.dtype",
    "pipeline_dtype": f"{_MEGATRON}.dtype",
    "bf16": f"{_MEGATRON}.dtype",
    "fp16": f"{_MEGATRON}.dtype",
}
"""Fields of TransformerConfig that are settings of their own."""

_MODELS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "mtp_num_layers",
)
"""Fields of TransformerConfig that the model's config.json decides."""

_UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def layout_problems(
    config: RunConfig, hf_config: Mapping[str, Any] | None, geometry: MoeGeometry | None
) -> list[str]:
    """Every parallel size that divides neither ranks nor model, and what Megatron gets wrong."""
    megatron = config.actor_rollout_ref.actor.megatron
    problems = _rank_problems(config, megatron)
    problems += _override_problems(megatron)
    if hf_config is not None:
        problems += _model_problems(config, hf_config, geometry)
        problems += _moe_problems(megatron, hf_config, geometry)
    return problems


def expert_tensor_parallel_size(megatron: Megatron) -> int:
    """Expert-TP in effect: as set, or TP when EP is 1, otherwise 1."""
    if megatron.expert_tensor_parallel_size is not None:
        return megatron.expert_tensor_parallel_size
    one_group = megatron.expert_model_parallel_size == 1
    return megatron.tensor_model_parallel_size if one_group else 1


def _rank_problems(config: RunConfig, megatron: Megatron) -> list[str]:
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    ep, etp = megatron.expert_model_parallel_size, expert_tensor_parallel_size(megatron)
    found = f"trainer.n_gpus_per_node: found {config.trainer.n_gpus_per_node}"
    if config.trainer.nnodes > 1:
        found += f" on trainer.nnodes={config.trainer.nnodes}, {ranks} ranks"
    problems = []
    if ranks % (tp * pp):
        problems.append(
            f"{found}, expected a multiple of {tp * pp} ranks: {_TP}={tp} times {_PP}={pp}; "
            f"write a multiple, or smaller sizes"
        )
    elif ranks % (ep * etp * pp):
        problems.append(
            f"{found}, expected a multiple of {ep * etp * pp} ranks: {_EP}={ep} times "
            f"{_ETP}={etp} times {_PP}={pp}; write a multiple, or smaller sizes"
        )
    elif (samples := _mini_batch_samples(config)) < ranks // (tp * pp):
        problems.append(
            "actor_rollout_ref.actor.ppo_mini_batch_size: found "
            f"{config.actor_rollout_ref.actor.ppo_mini_batch_size}, with rollout.n that is "
            f"{samples} samples for {ranks // (tp * pp)} data-parallel ranks; "
            "write more, or use fewer ranks"
        )
    if ep == 1 and etp != tp:
        problems.append(
            f"{_ETP}: found {etp}, expected {tp} like {_TP}: with {_EP}=1 Megatron-core would "
            f"train each tensor-parallel rank's experts apart, silently; write {tp} or null"
        )
    if pp == 1 and megatron.virtual_pipeline_model_parallel_size is not None:
        problems.append(
            f"{_VPP}: found {megatron.virtual_pipeline_model_parallel_size}, but {_PP} is 1; "
            "write null, or more pipeline stages"
        )
    return problems


def _mini_batch_samples(config: RunConfig) -> int:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    return actor.ppo_mini_batch_size * rollout.n


def _override_problems(megatron: Megatron) -> list[str]:
    override = megatron.override_transformer_config
    problems = [
        f"{_OVERRIDE}.{name}: found {override[name]!r}, which has a setting of its own; "
        f"write {_OURS[name]} instead"
        for name in _OURS
        if name in override
    ]
    problems += [
        f"{_OVERRIDE}.{name}: found {override[name]!r}, which the model's config.json decides; "
        "leave it out"
        for name in _MODELS
        if name in override
    ]
    problems += [
        f"{_OVERRIDE}.{name}: found {override[name]!r}; uneven pipeline stages are not supported "
        "yet; leave it out"
        for name in _UNEVEN
        if override.get(name)
    ]
    problems += override_problems(_OVERRIDE, override)
    interleaved = megatron.virtual_pipeline_model_parallel_size is not None
    if interleaved and megatron.pipeline_model_parallel_size == 2:
        problems += [
            f"{_OVERRIDE}.{name}: found {override[name]!r}, expected {right}: with {_PP}=2 and "
            f"{_VPP} Megatron-core would silently exchange activations for gradients; leave it out"
            for name, right in (("overlap_p2p_comm", True), ("batch_p2p_comm", False))
            if override.get(name, right) is not right
        ]
    return problems


def _model_problems(
    config: RunConfig, hf_config: Mapping[str, Any], geometry: MoeGeometry | None
) -> list[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    chunks = pp * (megatron.virtual_pipeline_model_parallel_size or 1)
    per_stage = _PP if chunks == pp else f"{_PP} times {_VPP}"
    engine_tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    rules = [(per_stage, chunks, "num_hidden_layers")]
    rules += [(_TP, tp, name) for name in ("num_attention_heads", "num_key_value_heads")]
    rules += [(_TP, tp, "vocab_size"), (_TP, tp, "shared_expert_intermediate_size")]
    if geometry is None or len(geometry.layers) < hf_config["num_hidden_layers"]:
        rules.append((_TP, tp, "intermediate_size"))
    rules.append(
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", engine_tp, "num_attention_heads")
    )
    return _indivisible(rules, hf_config)


def _moe_problems(
    megatron: Megatron, hf_config: Mapping[str, Any], geometry: MoeGeometry | None
) -> list[str]:
    tp, ep = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    if geometry is None:
        if ep == 1:
            return []
        return [f"{_EP}: found {ep}, but the model has no MoE layers; write 1"]
    # Mixtral has one name for the width of its experts and of other models' dense layers.
    width = "moe_intermediate_size" if "moe_intermediate_size" in hf_config else "intermediate_size"
    rules = [(_ETP, expert_tensor_parallel_size(megatron), width)]
    problems = _indivisible(rules, hf_config)
    if geometry.experts % ep:
        problems.append(_not_a_divisor(_EP, ep, "experts", geometry.experts))
    if tp > 1 and not megatron.sequence_parallel:
        problems.append(
            f"{_MEGATRON}.sequence_parallel: found False, but a MoE model with {_TP}={tp} needs "
            "it; write True"
        )
    return problems


def _indivisible(rules: list[tuple[str, int, str]], hf_config: Mapping[str, Any]) -> list[str]:
    return [
        _not_a_divisor(key, size, name, whole)
        for key, size, name in rules
        if isinstance(whole := hf_config.get(name), int) and whole % size
    ]


def _not_a_divisor(key: str, size: int, name: str, whole: int) -> str:
    fitting = [str(n) for n in range(1, min(whole, 64) + 1) if whole % n == 0]
    return (
        f"{key}: found {size}, expected a divisor of the model's {name}={whole}; "
        f"write one of {', '.join(fitting)}"
    )
