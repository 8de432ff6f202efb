"""Loads HF weights into a Megatron model, and lists the weights in an HF folder."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from mbridge.core.llm_bridge import LLMBridge
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import safe_open

from operators.cpu import without_cuda
from operators.cpu.layers import bridge_names
from operators.training.megatron import value_head
from pipeline.errors import InputError

_INDEX = "model.safetensors.index.json"
_OUTPUT = "lm_head.weight"
"""The output layer's weight in an HF folder; absent if the embeddings are tied."""


class NamedForBridge:
    """A model chunk whose parameters have the names that mbridge expects.

    mbridge decides from these names alone how to split, gather and rename tensors, so its tensor-
    and expert-parallel code works unchanged on local layers. The object keeps the state dict,
    because mbridge reads it once per weight. Building it again for each weight would take quadratic
    time in total, on a GPU as well as on a CPU.
    """

    def __init__(self, model: GPTModel, left_out: Collection[str] = ()) -> None:
        """Hide the parameters named in `left_out` from the bridge."""
        self.decoder = model.decoder
        self._model = model
        state = {
            name: tensor
            for name, tensor in model.state_dict().items()
            if "_extra_state" not in name and name not in left_out
        }
        self._names = (
            bridge_names(list(state)) if without_cuda.ON_CPU else {name: name for name in state}
        )
        self._state = {self._names[name]: tensor for name, tensor in state.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors under mbridge's names; they share memory with the model."""
        return self._state

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return the parameters under mbridge's names."""
        return (
            (self._names[name], parameter)
            for name, parameter in self._model.named_parameters()
            if name in self._names
        )


def load_weights(
    bridge: LLMBridge, bare_chunks: Sequence[GPTModel], folder: Path, with_output: bool = True
) -> None:
    """Load every weight of the model from an HF folder; every rank must call this.

    Weights of a multi-token-prediction layer are ignored, because that layer is not trained.

    Args:
        bridge: The bridge of the model's family.
        bare_chunks: This rank's chunks, without wrappers.
        folder: The HF model.
        with_output: Whether to load the output layer. False keeps the value head of a critic.

    Raises:
        InputError: A weight of the model is missing from the folder, or a weight in the folder is
            not part of the model (for example, a bias that Megatron's layer lacks).
    """
    left_out = () if with_output else (value_head.NAME,)
    views = [NamedForBridge(chunk, left_out) for chunk in bare_chunks]
    there = set(weight_files(folder)) - (set() if with_output else {_OUTPUT})
    used = {name for view in views for name in _hf_names(bridge, view)}
    missing = sorted(used - there)
    surplus = sorted(
        name
        for name in there - _everywhere(used)
        if not of_untrained_layer(name, bridge.hf_config.num_hidden_layers)
    )
    problems = []
    if missing:
        problems.append(f"{folder}: {len(missing)} weights are missing; the first is {missing[0]}")
    if surplus:
        problems.append(
            f"{folder}: {len(surplus)} weights are not part of Megatron's "
            f"{bridge.hf_config.model_type} model; the first is {surplus[0]}"
        )
    if problems:
        raise InputError(problems)
    with torch.no_grad():
        bridge.load_weights(views, str(folder))


def weight_files(folder: Path) -> dict[str, str]:
    """Map the name of each weight in an HF folder to the name of its safetensors file."""
    index = folder / _INDEX
    if index.exists():
        return dict(json.loads(index.read_text())["weight_map"])
    names: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names |= dict.fromkeys(file.keys(), path.name)
    if not names:
        raise InputError([f"{folder}: no safetensors file; convert the model to safetensors"])
    return names


def _hf_names(bridge: LLMBridge, view: NamedForBridge) -> Iterator[str]:
    for name in bridge._weight_name_mapping_mcore_local_to_global(view).values():
        yield from bridge._weight_name_mapping_mcore_to_hf(name)


def _everywhere(names: set[str]) -> set[str]:
    """Return the union of the names on all stages and expert-parallel ranks.

    The names are the same on all tensor-parallel ranks.
    """
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
    """Return whether a weight is in a multi-token-prediction layer.

    These layers are numbered from `layers` on, after the decoder's own layers.
    """
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match.group(1)) >= layers
