"""Compares the names and shapes of a model's tensors with its config.json."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from pipeline.errors import InputError
from pipeline.model.families import FAMILIES
from pipeline.model.fields import EXPERT_FIELDS, Config
from pipeline.model.widths import Widths, widths_of

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""The shapes of tensors, keyed by name; () if only the name is known."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r".+\.experts\.(\d+)\.")
_FUSED = re.compile(r".+\.experts\.[a-z]\w*(\.\w+)?")
"""The name of a tensor that contains all experts of a layer."""
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")
_PREDICTION = "eh_proj.weight"
"""A tensor that only multi-token-prediction layers have; num_hidden_layers does not include these
layers."""


def shape_problems(config: Config, shapes: Shapes) -> list[str]:
    """Return the contradictions between config.json and the weights.

    Each text continues a sentence that begins with the config's path. Example: "has
    vocab_size=300, but the weights have 512 tokens; ...". Tensors are named one by one only if the
    model's sizes agree.
    """
    if str(config.get("model_type")) not in FAMILIES or not shapes:
        return []
    layers = _layers(shapes)
    if problems := list(_size_problems(config, shapes, layers)):
        return problems
    try:
        expected = tensor_shapes(config)
    except InputError:  # a size is missing, which the rules for settings report
        return []
    return list(_tensor_problems(expected, _trained(shapes, layers)))


def tensor_shapes(config: Config) -> dict[str, Shape]:
    """Return the shapes of all tensors that a model's files contain, keyed by name.

    Multi-token-prediction layers, which are not trained, are left out. Raises InputError if the
    family is unknown, or if a size is missing from the config.
    """
    widths = widths_of(config)
    hidden, vocabulary = widths.hidden, widths.vocabulary
    shapes: dict[str, Shape] = {_EMBEDDING: (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not widths.tied:
        shapes[_OUTPUT] = (vocabulary, hidden)
    always = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"self_attn.{name}": shape for name, shape in _attention(widths).items()},
    }
    dense = _mlp("mlp", widths.dense, hidden)
    sparse = _sparse(config, widths)
    for layer, is_moe in enumerate(widths.moe_layers):
        tensors = {**always, **(sparse if is_moe else dense)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in tensors.items()}
    return shapes


def _attention(widths: Widths) -> dict[str, Shape]:
    hidden, latent = widths.hidden, widths.latent
    shapes: dict[str, Shape] = {"o_proj.weight": (hidden, widths.attended)}
    if latent is None:
        for name, width in (("q", widths.query), ("k", widths.key), ("v", widths.value)):
            shapes[f"{name}_proj.weight"] = (width, hidden)
            if widths.qkv_bias:
                shapes[f"{name}_proj.bias"] = (width,)
        if widths.head_norms:
            head = (widths.query // widths.heads,)
            shapes |= {"q_norm.weight": head, "k_norm.weight": head}
        return shapes
    if latent.query:
        shapes["q_a_proj.weight"] = (latent.query, hidden)
        shapes["q_a_layernorm.weight"] = (latent.query,)
        shapes["q_b_proj.weight"] = (widths.query, latent.query)
    else:
        shapes["q_proj.weight"] = (widths.query, hidden)
    up = widths.key - widths.heads * latent.rotary + widths.value
    shapes["kv_a_proj_with_mqa.weight"] = (latent.key_value + latent.rotary, hidden)
    shapes["kv_a_layernorm.weight"] = (latent.key_value,)
    shapes["kv_b_proj.weight"] = (up, latent.key_value)
    return shapes


def _mlp(
    prefix: str,
    width: int,
    hidden: int,
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Shape]:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}


def _sparse(config: Config, widths: Widths) -> dict[str, Shape]:
    """Return the shapes of the router and the experts of an MoE layer."""
    hidden, experts = widths.hidden, widths.experts
    if config["model_type"] == "mixtral":
        prefix, names = "block_sparse_moe", ("w1", "w3", "w2")
    else:
        prefix, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    shapes: dict[str, Shape] = {f"{prefix}.gate.weight": (experts, hidden)}
    for expert in range(experts):
        shapes |= _mlp(f"{prefix}.experts.{expert}", widths.expert, hidden, names)
    if FAMILIES[str(config["model_type"])].expert_bias:
        shapes[f"{prefix}.gate.e_score_correction_bias"] = (experts,)
    if widths.shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
        shapes |= _mlp("mlp.shared_expert", widths.shared, hidden)
    elif widths.shared:
        shapes |= _mlp("mlp.shared_experts", widths.shared, hidden)
    return shapes


def _size_problems(config: Config, shapes: Shapes, layers: Mapping[int, Shapes]) -> Iterator[str]:
    """Yield the sizes in config.json that differ from those of the weights as a whole."""
    found: dict[str, tuple[int | None, str]] = {
        "num_hidden_layers": (max(layers, default=-1) + 1, "layers")
    }
    for name in (_EMBEDDING, _OUTPUT):
        if len(shape := shapes.get(name, ())) == 2:
            found["vocab_size"] = (shape[0], "tokens")
            found["hidden_size"] = (shape[1], "numbers for each token")
    if FAMILIES[str(config["model_type"])].moe:
        field = next((name for name in EXPERT_FIELDS if config.get(name) is not None), "")
        found[field] = (max(_experts(layers), default=None), "experts in a layer")
    for field, (number, what) in found.items():
        if number and isinstance(config.get(field), int) and config[field] != number:
            yield (
                f"has {field}={config.get(field)!r}, but the weights have {number} {what}; use the "
                "config.json that came with the weights"
            )


def _tensor_problems(expected: Shapes, found: Shapes) -> Iterator[str]:
    """Yield the tensors that are missing, not part of the model, or of another shape."""
    missing = sorted(expected.keys() - found.keys())
    surplus = sorted(found.keys() - expected.keys())
    fused = [name for name in surplus if _FUSED.fullmatch(name)]
    if fused:
        yield (
            f"does not describe {_first(fused)}, which has all experts of a layer in one tensor; "
            f"the engine and the trainer read a tensor for each expert; load the model with "
            "transformers and save it with save_pretrained"
        )
        return
    if missing:
        yield (
            f"requires {_first(missing)}, which the weights lack; use the config.json that came "
            "with the weights, or save the model again with save_pretrained"
        )
    if surplus == [_OUTPUT]:
        yield (
            f"has tie_word_embeddings=True, but the weights contain {_OUTPUT}; write false, or "
            "remove that tensor"
        )
    elif surplus:
        yield (
            f"has no place for {_first(surplus)}, which the weights contain and the trainer does "
            "not use; use the config.json that came with the weights, or remove these tensors"
        )
    wrong = sorted(
        name for name in expected.keys() & found.keys() if found[name] not in ((), expected[name])
    )
    if wrong:
        name = wrong[0]
        yield (
            f"implies the shape {list(expected[name])} for {_first(wrong)}, but the weights have "
            f"{list(found[name])}; use the config.json that came with the weights"
        )


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} tensors such as {names[0]}"


def _layers(shapes: Shapes) -> dict[int, Shapes]:
    """Return the tensors of each decoder layer, keyed by the part of the name after the index."""
    layers: defaultdict[int, dict[str, Shape]] = defaultdict(dict)
    for name, shape in shapes.items():
        if match := _LAYER.fullmatch(name):
            layers[int(match[1])][match[2]] = shape
    return {layer: tensors for layer, tensors in layers.items() if _PREDICTION not in tensors}


def _trained(shapes: Shapes, layers: Mapping[int, Shapes]) -> Shapes:
    """Return the shapes without those of multi-token-prediction layers."""
    return {
        name: shape
        for name, shape in shapes.items()
        if not (match := _LAYER.fullmatch(name)) or int(match[1]) in layers
    }


def _experts(layers: Mapping[int, Shapes]) -> Iterator[int]:
    """Yield every number of experts that a router's shape or an expert's name implies."""
    for tensors in layers.values():
        for name, shape in tensors.items():
            if name in _ROUTERS and len(shape) == 2:
                yield shape[0]
            elif match := _EXPERT.match(name):
                yield int(match[1]) + 1
