"""The sizes of the activations that each layer keeps per token until its backward pass.

The sizes apply to Megatron-core's layers with Transformer Engine (flash attention, grouped GEMM,
fused SwiGLU), or to its local layers on the CPU. They are computed with the method of Korthikanti
et al., Reducing Activation Recomputation in Large Transformer Models (2022), here applied to
mixtures of experts.
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
    """Tensors that a layer keeps. Example: Kept('fc1', 6144.0, ('moe',))."""

    name: str
    bytes: float
    """Bytes per token of the micro-batch, on one rank."""
    recomputed_by: tuple[str, ...] = ()
    """The values of recompute_modules that recompute these tensors instead of keeping them."""


@dataclass(frozen=True)
class Recompute:
    """The selection of activations that the backward pass recomputes.

    The fields have the same meanings as TransformerConfig's recompute options. Example:
    Recompute('full', ...).
    """

    granularity: str | None = None
    method: str | None = None
    layers: int = 1
    modules: tuple[str, ...] = ()


def recompute_of(override: Mapping[str, Any]) -> Recompute:
    """Return the recomputation that override_transformer_config selects."""
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
    """The size of the layer's input, the only tensor that a fully recomputed layer keeps."""
    working: float
    """The maximum size of gradients and temporary tensors in the layer's backward pass."""

    def bytes(self, recomputed: Collection[str] = ()) -> float:
        """Return the bytes that the layer keeps if these modules are recomputed."""
        return sum(k.bytes for k in self.kept if not set(k.recomputed_by) & set(recomputed))


@dataclass(frozen=True)
class LayerCut:
    """The sizes, the parallel split and the data type of a layer's tensors."""

    widths: Widths
    cut: Cut
    item: int
    """Bytes per number in the model's dtype."""
    local: int | None = None
    """Number of tokens in the longest sequence if ranks use local layers on the CPU; None on GPUs.
    """


def layer_of(layer_cut: LayerCut, moe: bool) -> Layer:
    """Return the memory of one decoder layer."""
    widths, cut = layer_cut.widths, layer_cut.cut
    inner = widths.hidden * layer_cut.item / cut.sequence_parts
    attention = list(_latent(layer_cut) if widths.latent else _attention(layer_cut))
    mlp = list(_experts(layer_cut) if moe else _dense(layer_cut))
    norms = [
        Kept("inputs of the norms", 2 * norm_input_bytes(layer_cut)),
        Kept("outputs of the norms", 2 * inner, ("layernorm",)),
    ]
    return Layer((*norms, *attention, *mlp), inner, max(_sum(attention), _sum(mlp)))


def norm_input_bytes(layer_cut: LayerCut) -> float:
    """Return the bytes that a norm keeps per token, excluding its output.

    The output is counted separately. A local norm converts its input to float32, and keeps the
    converted input both before and after the division that normalises it.
    """
    numbers = layer_cut.widths.hidden / layer_cut.cut.sequence_parts
    return numbers * (layer_cut.item if layer_cut.local is None else 2 * _FP32)


def _sum(parts: list[Kept]) -> float:
    return sum(part.bytes for part in parts)


def _attention(layer_cut: LayerCut) -> Iterator[Kept]:
    widths, size = layer_cut.widths, layer_cut.item / layer_cut.cut.tp
    both = widths.query + widths.key
    if layer_cut.local is None:
        # Values are views of this tensor.
        yield Kept("queries, keys, values", (both + widths.value) * size)
        yield Kept("rotated queries and keys", both * size)
    if widths.head_norms:
        norms = layer_cut.item if layer_cut.local is None else 2 * _FP32
        yield Kept("queries and keys at their norms", both * norms / layer_cut.cut.tp)
        # Keys are not converted, so they are views and need no memory.
        if layer_cut.local is not None and layer_cut.item == _FP32:
            yield Kept("queries and values before", (widths.query + widths.value) * size)
    head = widths.query // widths.heads
    yield Kept("rotary embeddings", 4 * head * layer_cut.item)
    yield from _core(layer_cut)


def _latent(layer_cut: LayerCut) -> Iterator[Kept]:
    widths, latent = layer_cut.widths, layer_cut.widths.latent
    assert latent is not None
    size, whole = layer_cut.item / layer_cut.cut.tp, layer_cut.item / layer_cut.cut.sequence_parts
    down = latent.query + latent.key_value
    yield Kept("compressed queries, keys, values", (2 * down + latent.rotary) * whole)
    if layer_cut.local is not None:  # the local norms keep float32, as in `norm_input_bytes`
        yield Kept("compressed in float32", down * (2 * _FP32 * whole / layer_cut.item - whole))
    if layer_cut.local is None:
        up = (widths.query + widths.key + widths.value) * size
        yield Kept("queries, keys, values", up, ("mla_up_proj",))
    yield Kept("rotary embeddings", 4 * latent.rotary * layer_cut.item, ("mla_up_proj",))
    yield from _core(layer_cut)


def _core(layer_cut: LayerCut) -> Iterator[Kept]:
    widths, size = layer_cut.widths, layer_cut.item / layer_cut.cut.tp
    yield Kept("attention's output", widths.attended * size)
    if layer_cut.local is None:
        yield Kept("softmax's sums", widths.heads * _FP32 / layer_cut.cut.tp, ("core_attn",))
        return
    values = widths.attended  # like keys, values are repeated for each head
    yield Kept("each head's queries, keys, values", (2 * widths.query + values) * size)
    converted = _FP32 + (layer_cut.item if layer_cut.item < _FP32 else 0)
    scores = widths.heads * layer_cut.local / layer_cut.cut.tp
    yield Kept("probabilities", scores * converted, ("core_attn",))


def _dense(layer_cut: LayerCut) -> Iterator[Kept]:
    yield from _gated(
        layer_cut, "MLP", layer_cut.widths.dense * layer_cut.item / layer_cut.cut.tp, "mlp"
    )


def _gated(layer_cut: LayerCut, name: str, width: float, module: str) -> Iterator[Kept]:
    modules = ("moe_act",) if name == "experts" else ()
    yield Kept(f"{name}: gate and up", 2 * width, (module,))
    yield Kept(f"{name}: product", width, (module, *modules))
    # Local layers are not fused, so they keep one more tensor. Local experts also keep the product
    # before weighting.
    if layer_cut.local is not None:
        yield Kept(f"{name}: in between", (1 + (name == "experts")) * width, (module,))


def _experts(layer_cut: LayerCut) -> Iterator[Kept]:
    widths, cut = layer_cut.widths, layer_cut.cut
    own = 1 / cut.sequence_parts  # the share of tokens that this rank's router processes
    # With balanced experts, a rank receives as many tokens as it sends.
    rows = own * widths.topk * cut.etp
    scores = (2 * _FP32 + 1) * widths.experts
    yield Kept("router: scores, probabilities, map", scores * own, ("moe",))
    yield Kept("destinations of tokens", 3 * _INDEX * rows, ("moe",))
    yield Kept("input of experts", rows * widths.hidden * layer_cut.item, ("moe",))
    yield from _gated(layer_cut, "experts", rows * widths.expert * layer_cut.item / cut.etp, "moe")
    if widths.shared:
        width = widths.shared * layer_cut.item / cut.tp
        parts = _gated(layer_cut, "shared experts", width, "moe")
        yield from (Kept(p.name, p.bytes, (*p.recomputed_by, "shared_experts")) for p in parts)
