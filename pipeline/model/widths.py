"""Widths of a model's layers and the numbers of its weights, from config.json alone.

Weights are counted by how parallel layouts cut them. Multi-token-prediction layers, which are not
trained, do not count.
"""

from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError
from pipeline.model.families import FAMILIES, Config, Family, moe_geometry


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention. Example: Latent(1536, 512, 64)."""

    query: int
    """Width of the compressed queries; 0: queries are not compressed."""
    key_value: int
    """Width of the compressed keys and values."""
    rotary: int
    """Width of the key's rotary part, which all heads share."""


@dataclass(frozen=True)
class Widths:
    """Numbers per token at each place of a decoder layer.

    Example, Qwen3-30B-A3B: Widths(hidden=2048, heads=32, query=4096, key=512, value=512,
    attended=4096, latent=None, dense=6144, expert=768, shared=0, experts=128, topk=8,
    vocabulary=151936, ...).
    """

    hidden: int
    heads: int
    query: int
    """All heads' queries together; so too for keys and values, of fewer heads in grouped ones."""
    key: int
    value: int
    attended: int
    """The attention's output before its last projection."""
    latent: Latent | None
    dense: int
    """Inner width of a dense MLP."""
    expert: int
    """Inner width of one expert."""
    shared: int
    """Inner width of the shared experts together; 0: there are none."""
    experts: int
    topk: int
    vocabulary: int
    head_norms: bool
    qkv_bias: bool
    shared_gate: bool
    tied: bool
    """Whether the output layer's weight is the embedding's."""
    moe_layers: tuple[bool, ...]
    """For each decoder layer whether it is a MoE layer."""


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer."""

    whole: int
    """On each tensor-parallel rank: norms, routers, latent attention's down-projections."""
    cut: int
    """Cut over tensor-parallel ranks: attention, dense MLP, shared experts."""
    experts: int
    """Cut over expert-parallel and expert-tensor-parallel ranks."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.whole + self.cut + self.experts


def widths_of(config: Config) -> Widths:
    """The widths of a known family's model.

    Raises InputError for an unknown family, and for a config that lacks a number.
    """
    geometry = moe_geometry(config)
    family = FAMILIES[str(config["model_type"])]
    hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    layers = _need(config, "num_hidden_layers")
    moe = frozenset(geometry.layers if geometry else ())
    dense = _need(config, "intermediate_size")
    expert = int(config.get("moe_intermediate_size") or dense)
    gated = int(config.get("shared_expert_intermediate_size") or 0)
    shared = gated or expert * int(config.get("n_shared_experts") or 0)
    return Widths(
        hidden=hidden,
        heads=heads,
        **_attention(config, family, hidden, heads),
        dense=dense,
        expert=expert if moe else 0,
        shared=shared if moe else 0,
        experts=geometry.experts if geometry else 0,
        topk=geometry.topk if geometry else 0,
        vocabulary=_need(config, "vocab_size"),
        head_norms=family.head_norms(config),
        qkv_bias=family.qkv_bias(config),
        shared_gate=bool(gated and moe),
        tied=bool(config.get("tie_word_embeddings", False)),
        moe_layers=tuple(layer in moe for layer in range(layers)),
    )


def _attention(config: Config, family: Family, hidden: int, heads: int) -> dict[str, Any]:
    if family.latent:
        rotary = _need(config, "qk_rope_head_dim")
        width = heads * (_need(config, "qk_nope_head_dim") + rotary)
        value = heads * _need(config, "v_head_dim")
        latent = Latent(int(config.get("q_lora_rank") or 0), _need(config, "kv_lora_rank"), rotary)
        return {"query": width, "key": width, "value": value, "attended": value, "latent": latent}
    head = int(config.get("head_dim") or hidden // heads)
    grouped = head * int(config.get("num_key_value_heads") or heads)
    return {
        "query": heads * head,
        "key": grouped,
        "value": grouped,
        "attended": heads * head,
        "latent": None,
    }


def layer_weights(widths: Widths, moe: bool) -> LayerWeights:
    """The weights of one decoder layer."""
    hidden = widths.hidden
    whole, cut = _attention_weights(widths)
    whole += 2 * hidden  # the norms before attention and MLP
    if not moe:
        return LayerWeights(whole, cut + 3 * hidden * widths.dense, 0)
    whole += hidden * widths.experts + hidden * widths.shared_gate
    return LayerWeights(
        whole, cut + 3 * hidden * widths.shared, 3 * hidden * widths.expert * widths.experts
    )


def _attention_weights(widths: Widths) -> tuple[int, int]:
    hidden, latent = widths.hidden, widths.latent
    output = widths.attended * hidden
    if latent is None:
        sums = widths.query + widths.key + widths.value
        norms = 2 * (widths.query // widths.heads) if widths.head_norms else 0
        return norms, output + sums * (hidden + widths.qkv_bias)
    down = hidden * (latent.key_value + latent.rotary) + latent.key_value
    # Keys without their rotary part, which is not projected up.
    up = latent.key_value * (widths.key - widths.heads * latent.rotary + widths.value)
    if not latent.query:
        return down, output + up + hidden * widths.query
    down += (hidden + 1) * latent.query
    return down, output + up + latent.query * widths.query


def weight_count(widths: Widths) -> int:
    """All weights of the model."""
    ends = widths.vocabulary * widths.hidden * (1 if widths.tied else 2) + widths.hidden
    return ends + sum(layer_weights(widths, moe).total for moe in widths.moe_layers)


def _need(config: Config, name: str) -> int:
    value = config.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise InputError(
        [
            f"actor_rollout_ref.model.path: config.json has {name}={value!r}, expected a positive "
            "integer; use the config.json that came with the model"
        ]
    )
