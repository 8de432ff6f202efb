"""HF weights into Megatron's model, and what an HF folder holds."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors import safe_open

from operators.training.local_layers import NamedForBridge
from pipeline.config.errors import InputError

_INDEX = "model.safetensors.index.json"


def load_weights(bridge: Any, bare_chunks: Sequence[torch.nn.Module], folder: Path) -> None:
    """Load every weight of the model from an HF folder. Collective.

    Raises InputError if a weight of the model is not in the folder, or one in the folder has no
    place in the model (a bias that Megatron's layer has not, say), except those of a multi-token-
    prediction layer, which is not trained.
    """
    views = [NamedForBridge(chunk) for chunk in bare_chunks]
    there = set(weight_files(folder))
    used = {name for view in views for name in _hf_names(bridge, view)}
    missing = sorted(used - there)
    surplus = sorted(
        name
        for name in there - _everywhere(used)
        if not of_untrained_layer(name, bridge.hf_config.num_hidden_layers)
    )
    problems = []
    if missing:
        problems.append(f"{folder}: {len(missing)} weights are missing, the first is {missing[0]}")
    if surplus:
        problems.append(
            f"{folder}: {len(surplus)} weights have no place in Megatron's "
            f"{bridge.hf_config.model_type} model, the first is {surplus[0]}"
        )
    if problems:
        raise InputError(problems)
    with torch.no_grad():
        bridge.load_weights(views, str(folder))


def weight_files(folder: Path) -> dict[str, str]:
    """Name of each weight of an HF folder -> name of its safetensors file."""
    index = folder / _INDEX
    if index.exists():
        return dict(json.loads(index.read_text())["weight_map"])
    names = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names |= dict.fromkeys(file.keys(), path.name)
    if not names:
        raise InputError([f"{folder}: no safetensors file; convert the model to safetensors"])
    return names


def _hf_names(bridge: Any, view: NamedForBridge) -> Iterator[str]:
    for name in bridge._weight_name_mapping_mcore_local_to_global(view).values():
        yield from bridge._weight_name_mapping_mcore_to_hf(name)


def _everywhere(names: set[str]) -> set[str]:
    """The union over stages and expert-parallel ranks; tensor-parallel ranks have the same."""
    groups = [
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
    ]
    for group in groups:
        gathered: list[set[str]] = [set()] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, names, group=group)
        names = set().union(*gathered)
    return names


def of_untrained_layer(name: str, layers: int) -> bool:
    """Multi-token-prediction layers follow the decoder's, by number."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match.group(1)) >= layers
