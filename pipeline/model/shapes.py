"""Compares the names and shapes of a model's tensors with its config.json."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from pipeline.model.families import EXPERT_FIELDS, FAMILIES, Config

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of tensors, keyed by name; () if only the name is known."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r".+\.experts\.(\d+)\.")
_EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")
"""The weights of the embedding and of the output layer; tied weights may have either name."""
_ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")
_PREDICTION = "eh_proj.weight"
"""A tensor that only multi-token-prediction layers have; num_hidden_layers does not include these
layers."""


def shape_problems(config: Config, shapes: Shapes) -> list[str]:
    """Return the contradictions between config.json and the weights.

    Weights with unknown names are not checked. Each text continues a sentence that begins with the
    config's path. Example: "has vocab_size=300, but the weights have 512 tokens; ...".
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return []
    layers = _layers(shapes)
    found: dict[str, tuple[int | None, str]] = {
        "num_hidden_layers": (max(layers, default=-1) + 1, "layers")
    }
    for name in _EMBEDDINGS:
        if len(shape := shapes.get(name, ())) == 2:
            found["vocab_size"] = (shape[0], "tokens")
            found["hidden_size"] = (shape[1], "numbers for each token")
    if family.moe:
        field = next((name for name in EXPERT_FIELDS if config.get(name) is not None), "")
        found[field] = (max(_experts(layers), default=None), "experts in a layer")
    return [
        f"has {field}={config.get(field)!r}, but the weights have {number} {what}; use the "
        "config.json that came with the weights"
        for field, (number, what) in found.items()
        if number and isinstance(config.get(field), int) and config[field] != number
    ]


def _layers(shapes: Shapes) -> dict[int, Shapes]:
    """Return the tensors of each decoder layer, keyed by the part of the name after the index."""
    layers: defaultdict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in shapes.items():
        if match := _LAYER.fullmatch(name):
            layers[int(match[1])][match[2]] = shape
    return {layer: tensors for layer, tensors in layers.items() if _PREDICTION not in tensors}


def _experts(layers: Mapping[int, Shapes]) -> Iterator[int]:
    """Yield every number of experts that a router's shape or an expert's name implies."""
    for tensors in layers.values():
        for name, shape in tensors.items():
            if name in _ROUTERS and len(shape) == 2:
                yield shape[0]
            elif match := _EXPERT.match(name):
                yield int(match[1]) + 1
