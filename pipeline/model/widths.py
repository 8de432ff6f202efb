"""Widths of a model's layers and counts of its weights, computed only from config.json.

Weights that parallel layouts split in different ways are counted separately. Multi-token-prediction
layers are neither trained nor counted.
"""

from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError
from pipeline.model.families import FAMILIES, Family, moe_geometry
from pipeline.model.fields import Config


@dataclass(frozen=True)
class Latent:
    """The widths of multi-head latent attention. Example: Latent(1536, 512, 64)."""

    query: int
    """The width of the compressed queries; 0 if queries are not compressed."""
    key_value: int
    """The width of the compressed keys and values."""
    rotary: int
    """The width of the key's rotary part, which all heads share."""


@dataclass(frozen=True)
class Widths:
    """The widths of a decoder layer, in values per token.

    Example, Qwen3-30B-A3B: Widths(hidden=2048, heads=32, query=4096, key=512, value=512,
    attended=4096, latent=None, dense=6144, expert=768, shared=0, experts=128, topk=8,
    vocabulary=151936, ...).
    """

    hidden: int
    heads: int
    query: int
    """The width of the queries of all heads together. `key` and `value` also cover all heads, but
    with grouped attention, there are fewer heads for keys and values."""
    key: int
    value: int
    attended: int
    """The width of the attention's output before the last projection."""
    latent: Latent | None
    dense: int
    """The inner width of a dense MLP."""
    expert: int
    """The inner width of one expert."""
    shared: int
    """The inner width of all shared experts together; 0 if there are no shared experts."""
    experts: int
    topk: int
    vocabulary: int
    head_norms: bool
    qkv_bias: bool
    shared_gate: bool
    tied: bool
    """Whether the output layer uses the embedding's weight."""
    moe_layers: tuple[bool, ...]
    """For each decoder layer, whether it is a MoE layer."""


@dataclass(frozen=True)
class LayerWeights:
    """The numbers of weights in one decoder layer."""

    whole: int
    """Weights that each tensor-parallel rank holds in full: norms, routers, and the
    down-projections of latent attention."""
    cut: int
    """Weights split over tensor-parallel ranks: attention, dense MLP, shared experts."""
    experts: int
    """Weights split over expert-parallel and expert-tensor-parallel ranks."""

    @property
    def total(self) -> int:
        """The total number of weights in the layer."""
        return self.whole + self.cut + self.experts


def widths_of(config: Config) -> Widths:
    """Return the widths of a model.

    Raises InputError if the family is unknown, or if a number is missing from the config.
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
    """Return the numbers of weights in one decoder layer."""
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
    # Exclude the rotary part of the keys, which is not projected up.
    up = latent.key_value * (widths.key - widths.heads * latent.rotary + widths.value)
    if not latent.query:
        return down, output + up + hidden * widths.query
    down += (hidden + 1) * latent.query
    return down, output + up + latent.query * widths.query


def weight_count(widths: Widths) -> int:
    """Return the total number of weights in the model."""
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
