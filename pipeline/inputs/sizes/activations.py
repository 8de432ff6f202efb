"""What the training pass keeps of each token between forward and backward, layer by layer.

Counted for Megatron-core's layers with Transformer Engine (flash attention, grouped GEMM, fused
SwiGLU), or with its local layers on CPU. The method is that of Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models (2022), for mixtures of experts.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.inputs.sizes.cut import Cut
from pipeline.model.widths import Widths

_FP32 = 4
_INDEX = 8


@dataclass(frozen=True)
class Kept:
    """Something that a layer keeps. Example: Kept('fc1', 6144.0, ('moe',))."""

    name: str
    bytes: float
    """Per token of the micro-batch, on one rank."""
    recomputed_by: tuple[str, ...] = ()
    """Any of these recompute_modules keeps it no longer."""


@dataclass(frozen=True)
class Recompute:
    """Which activations are computed again in the backward pass. Example: Recompute('full', ...).

    Fields of TransformerConfig.
    """

    granularity: str | None = None
    method: str | None = None
    layers: int = 1
    modules: tuple[str, ...] = ()


def recompute_of(override: Mapping[str, Any]) -> Recompute:
    """The recomputation that override_transformer_config asks for."""
    granularity = override.get("recompute_granularity")
    modules = override.get("recompute_modules")
    return Recompute(
        granularity=granularity,
        method=override.get("recompute_method"),
        layers=override.get("recompute_num_layers") or 1,
        modules=tuple(["core_attn"] if modules is None else modules),
    )


@dataclass(frozen=True)
class Layer:
    """The memory of one decoder layer, per token of the micro-batch, on one rank, in bytes."""

    kept: tuple[Kept, ...]
    input: float
    """Its input, which is all that is kept of a layer that is recomputed as a whole."""
    working: float
    """The largest gradients and temporary tensors of its backward pass."""

    def bytes(self, recomputed: Collection[str] = ()) -> float:
        """What it keeps when these modules are recomputed."""
        return sum(k.bytes for k in self.kept if not set(k.recomputed_by) & set(recomputed))


@dataclass(frozen=True)
class LayerCut:
    """How a layer's tensors are cut and stored."""

    widths: Widths
    cut: Cut
    item: int
    """Bytes of a number in the model's dtype."""
    local: bool
    """Megatron-core's local layers, on CPU."""


def layer_of(layer_cut: LayerCut, moe: bool) -> Layer:
    """The memory of one decoder layer."""
    widths, cut = layer_cut.widths, layer_cut.cut
    inner = widths.hidden * layer_cut.item / cut.sequence_parts
    attention = list(_latent(layer_cut) if widths.latent else _attention(layer_cut))
    mlp = list(_experts(layer_cut) if moe else _dense(layer_cut))
    kept = (
        Kept("input of the norm before attention", inner),
        Kept("input of attention", inner, ("layernorm",)),
        *attention,
        Kept("input of the norm before the MLP", inner),
        Kept("input of the MLP", inner, ("layernorm",)),
        *mlp,
    )
    return Layer(kept, inner, max(_sum(attention), _sum(mlp)))


def _sum(parts: list[Kept]) -> float:
    return sum(part.bytes for part in parts)


def _attention(layer_cut: LayerCut) -> Iterator[Kept]:
    widths, size = layer_cut.widths, layer_cut.item / layer_cut.cut.tp
    # Values are a view of the joint projection, which therefore stays as a whole.
    yield Kept("queries, keys, values", (widths.query + widths.key + widths.value) * size)
    yield Kept("rotated queries and keys", (widths.query + widths.key) * size)
    if widths.head_norms:
        yield Kept("queries and keys before their norms", (widths.query + widths.key) * size)
    yield from _core(layer_cut)


def _latent(layer_cut: LayerCut) -> Iterator[Kept]:
    widths, latent = layer_cut.widths, layer_cut.widths.latent
    assert latent is not None
    size, whole = layer_cut.item / layer_cut.cut.tp, layer_cut.item / layer_cut.cut.sequence_parts
    down = latent.query + latent.key_value
    yield Kept("compressed queries, keys and values", (2 * down + latent.rotary) * whole)
    up = 2 * widths.query + 2 * widths.key + 2 * widths.value
    yield Kept("queries, keys, values", up * size, ("mla_up_proj",))
    yield from _core(layer_cut)


def _core(layer_cut: LayerCut) -> Iterator[Kept]:
    widths, cut = layer_cut.widths, layer_cut.cut
    yield Kept("attention's output", widths.attended * layer_cut.item / cut.tp)
    yield Kept("softmax's sums", widths.heads * _FP32 / cut.tp, ("core_attn",))


def _dense(layer_cut: LayerCut) -> Iterator[Kept]:
    yield from _gated(
        layer_cut, "MLP", layer_cut.widths.dense * layer_cut.item / layer_cut.cut.tp, "mlp"
    )


def _gated(layer_cut: LayerCut, name: str, width: float, module: str) -> Iterator[Kept]:
    modules = ("moe_act",) if name == "experts" else ()
    yield Kept(f"{name}: gate and up", 2 * width, (module,))
    yield Kept(f"{name}: their product", width, (module, *modules))
    if layer_cut.local:  # not fused: the activated gate is a tensor of its own
        yield Kept(f"{name}: activated gate", width, (module,))


def _experts(layer_cut: LayerCut) -> Iterator[Kept]:
    widths, cut = layer_cut.widths, layer_cut.cut
    own = 1 / cut.sequence_parts  # the share of the tokens that this rank's router sees
    # Balanced: what leaves for other ranks' experts comes back from others.
    rows = own * widths.topk * cut.etp
    scores = (2 * _FP32 + 1) * widths.experts
    yield Kept("router: scores, probabilities, map", scores * own, ("moe",))
    yield Kept("where tokens go", 3 * _INDEX * rows, ("moe",))
    yield Kept("input of experts", rows * widths.hidden * layer_cut.item, ("moe",))
    yield from _gated(layer_cut, "experts", rows * widths.expert * layer_cut.item / cut.etp, "moe")
    if widths.shared:
        width = widths.shared * layer_cut.item / cut.tp
        parts = _gated(layer_cut, "shared experts", width, "moe")
        yield from (Kept(p.name, p.bytes, (*p.recomputed_by, "shared_experts")) for p in parts)
