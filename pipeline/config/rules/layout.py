"""Rules for parallel sizes: they must be compatible with each other, the ranks and the model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.config.actor import Megatron
from pipeline.config.rules.overrides import MEGATRON, OVERRIDE
from pipeline.config.tree import RunConfig
from pipeline.model.families import expert_width, moe_geometry

_TP = f"{MEGATRON}.tensor_model_parallel_size"
_PP = f"{MEGATRON}.pipeline_model_parallel_size"
_CP = f"{MEGATRON}.context_parallel_size"
_VPP = f"{MEGATRON}.virtual_pipeline_model_parallel_size"
_ENGINE_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_EP = f"{MEGATRON}.expert_model_parallel_size"
_ETP = f"{MEGATRON}.expert_tensor_parallel_size"
_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Fields of override_transformer_config that count the embedding, or the loss, as a layer."""


def layout_problems(config: RunConfig, hf_config: Mapping[str, Any] | None) -> list[str]:
    """Return problems with parallel sizes that do not fit together or that Megatron mishandles.

    Args:
        config: The settings.
        hf_config: The model's config.json; None skips the rules that need it.
    """
    of_model = () if hf_config is None else _model_problems(config, hf_config)
    return [*_rank_problems(config), *of_model]


def expert_tensor_parallel_size(megatron: Megatron) -> int:
    """Return the effective expert-TP: the setting or, if it is null, TP if EP is 1, else 1."""
    if megatron.expert_tensor_parallel_size is not None:
        return megatron.expert_tensor_parallel_size
    one_group = megatron.expert_model_parallel_size == 1
    return megatron.tensor_model_parallel_size if one_group else 1


def size_problems(megatron: Megatron, ranks: int, found: str) -> Iterator[str]:
    """Yield problems with parallel sizes, and with sizes that do not fit the number of ranks.

    At EP 1, Megatron-core 0.16.1 treats expert weights as dense weights, and sums their gradients
    only over the dense data-parallel group (tensor_parallel/layers.py: allreduce = not (is_expert
    and EP > 1)). With expert-TP 1 and TP > 1, each rank would train its own copy of the experts on
    its own part of the tokens. The copies would drift apart without an error.

    Args:
        megatron: The parallel sizes.
        ranks: Number of training ranks.
        found: Start of the message, with the settings that determine the number of ranks.
    """
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    ep, etp = megatron.expert_model_parallel_size, expert_tensor_parallel_size(megatron)
    cp = megatron.context_parallel_size
    if ranks % (tp * pp * cp):
        context = f" times {_CP}={cp}" if cp > 1 else ""
        yield (
            f"{found}, expected a multiple of {tp * pp * cp} ranks: {_TP}={tp} times {_PP}={pp}"
            f"{context}; write a multiple, or smaller sizes"
        )
    elif ranks % (ep * etp * pp):
        yield (
            f"{found}, expected a multiple of {ep * etp * pp} ranks: {_EP}={ep} times "
            f"{_ETP}={etp} times {_PP}={pp}; write a multiple, or smaller sizes"
        )
    if ep == 1 and etp != tp:
        yield (
            f"{_ETP}: found {etp}, expected {tp}, the same as {_TP}; with {_EP}=1 Megatron-core "
            "would silently train separate experts on each tensor-parallel rank; write "
            f"{tp} or null"
        )
    if pp == 1 and megatron.virtual_pipeline_model_parallel_size is not None:
        yield (
            f"{_VPP}: found {megatron.virtual_pipeline_model_parallel_size}, but {_PP} is 1; "
            "write null, or more pipeline stages"
        )


def _rank_problems(config: RunConfig) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    found = f"trainer.n_gpus_per_node: found {config.trainer.n_gpus_per_node}"
    if config.trainer.nnodes > 1:
        found += f" on trainer.nnodes={config.trainer.nnodes}, {ranks} ranks"
    yield from size_problems(megatron, ranks, found)
    shared = (
        megatron.tensor_model_parallel_size
        * megatron.pipeline_model_parallel_size
        * megatron.context_parallel_size
    )
    prompts = config.actor_rollout_ref.actor.ppo_mini_batch_size
    samples = prompts * config.actor_rollout_ref.rollout.n
    if ranks % shared == 0 and samples < ranks // shared:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size: found {prompts}, which with rollout.n "
            f"gives {samples} samples for {ranks // shared} data-parallel ranks; write more, or "
            "use fewer ranks"
        )


def _model_problems(config: RunConfig, hf_config: Mapping[str, Any]) -> Iterator[str]:
    megatron, rollout = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.rollout
    geometry = moe_geometry(hf_config)
    cut = ["num_attention_heads", "num_key_value_heads", "vocab_size"]
    cut.append("shared_expert_intermediate_size")
    if geometry is None or len(geometry.layers) < hf_config["num_hidden_layers"]:
        cut.append("intermediate_size")
    engine = ["num_attention_heads"]
    yield from _stage_problems(megatron, hf_config)
    yield from _indivisible(_TP, megatron.tensor_model_parallel_size, cut, hf_config)
    yield from _indivisible(_ENGINE_TP, rollout.tensor_model_parallel_size, engine, hf_config)
    ep = megatron.expert_model_parallel_size
    if geometry is not None:
        etp, width = expert_tensor_parallel_size(megatron), expert_width(hf_config)
        unset = megatron.expert_tensor_parallel_size is None
        origin = " (null: the same as tensor_model_parallel_size)" if unset else ""
        yield from _indivisible(_ETP, etp, [width], hf_config, origin)
        yield from _indivisible(_EP, ep, ["experts"], {"experts": geometry.experts})
    elif ep > 1:
        yield f"{_EP}: found {ep}, but the model has no MoE layers; write 1"


def _stage_problems(megatron: Megatron, hf_config: Mapping[str, Any]) -> list[str]:
    """Check that Megatron can split the layers into stages and chunks, evenly or as requested."""
    pp, vpp = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size
    override, layers = megatron.override_transformer_config, hf_config["num_hidden_layers"]
    ends = {name: override[name] for name in _ENDS if type(override.get(name)) is int}
    counted = [name for name in _COUNTED if override.get(name) is True]
    if not ends and not counted:
        per_stage = _PP if vpp is None else f"{_PP} times {_VPP}"
        return _indivisible(per_stage, pp * (vpp or 1), ["num_hidden_layers"], hf_config)
    shown = ", ".join([*(f"{name}={ends[name]}" for name in ends), *counted])
    found = f"{OVERRIDE}: found {shown} with {_PP}={pp} and num_hidden_layers={layers}"
    if ends and counted:
        return [f"{found}, expected one way to split the layers; leave {counted[0]} out"]
    if ends and pp == 1:
        return [f"{found}, which is one stage; leave {next(iter(ends))} out, or write more stages"]
    stages, rest = pp - len(ends), layers + len(counted) - sum(ends.values())
    if stages < 0 or (rest if stages == 0 else rest < stages or rest % stages):
        return [
            f"{found}, which leaves {rest} layers for {max(stages, 0)} stages; write numbers that "
            "leave the same number of layers for each stage"
        ]
    sizes = [*ends.values(), *([rest // stages] if stages else [])]
    if vpp is not None and any(size % vpp for size in sizes):
        return [
            f"{found}, which gives stages of {', '.join(map(str, sizes))} layers, expected "
            f"multiples of {_VPP}={vpp}; write different numbers, or null for {_VPP}"
        ]
    return []


def _indivisible(
    key: str, size: int, names: Sequence[str], hf_config: Mapping[str, Any], origin: str = ""
) -> list[str]:
    """Return a problem if a size does not divide every one of the model's dimensions in `names`."""
    wholes = {name: whole for name in names if isinstance(whole := hf_config.get(name), int)}
    broken = [f"{name}={whole}" for name, whole in wholes.items() if whole % size]
    if not broken:
        return []
    largest = math.gcd(*wholes.values())
    fitting = [str(n) for n in range(1, min(largest, 64) + 1) if largest % n == 0]
    return [
        f"{key}: found {size}{origin}, expected a divisor of the model's {', '.join(broken)}; "
        f"write {'one of ' if len(fitting) > 1 else ''}{', '.join(fitting)}"
    ]
