"""Export of the trained model as an HF folder, which the rollout engines load."""

import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from mbridge.core.llm_bridge import LLMBridge
from safetensors import safe_open
from safetensors.torch import save_file

from operators.training.megatron.local_layers import NamedForBridge
from operators.training.megatron.model import LoadedModel
from operators.training.megatron.weights import of_untrained_layer, weight_files


def export_hf(model: LoadedModel, source: Path, target: Path) -> None:
    """Write the model as an HF folder like `source`, from which it was built. Collective.

    Rank 0 writes safetensors files with the same names and tensors as the source's, in the model's
    dtype (an expert bias in the source's). Weights of untrained layers, and all other files (index,
    config, tokenizer), are copied from the source unchanged.
    """
    bridge = model.bridge
    tensors = bridge.export_weights([NamedForBridge(chunk) for chunk in model.bare_chunks])
    if torch.distributed.get_rank() != 0:
        for _ in tensors:
            pass
        return
    target.mkdir(parents=True, exist_ok=True)
    _write_files(_as_in_source(tensors, source, bridge), weight_files(source), target)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copyfile(path, target / path.name)


def _as_in_source(
    tensors: Iterator[tuple[str, torch.Tensor]], source: Path, bridge: LLMBridge
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors on CPU in the dtype of the files, then those of untrained layers."""
    files = weight_files(source)
    for name, tensor in tensors:
        dtype = bridge.dtype
        if name.endswith("e_score_correction_bias"):
            dtype = _read(source / files[name], name).dtype
        yield name, tensor.detach().to("cpu", dtype, copy=True).contiguous()
    for name, file in files.items():
        if of_untrained_layer(name, bridge.hf_config.num_hidden_layers):
            yield name, _read(source / file, name)


def _write_files(
    tensors: Iterator[tuple[str, torch.Tensor]], files: dict[str, str], target: Path
) -> None:
    """Write each file as soon as its last weight has arrived, so that few weights are held."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for name, file in files.items():
        wanted[file].add(name)
    held: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors:
        file = files[name]
        if file not in wanted:
            continue  # Tied embeddings come twice, from the first and the last stage.
        held[file][name] = tensor
        if held[file].keys() == wanted[file]:
            save_file(held.pop(file), target / file, metadata={"format": "pt"})
            del wanted[file]
    if wanted:
        raise RuntimeError(f"export to {target}: no weights came for {sorted(wanted)}")


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as source:
        tensor: torch.Tensor = source.get_tensor(name)
    return tensor
