"""Loads a policy version's changed tensors into a running engine, in place.

vLLM loads a module's tensors into empty memory, and copies this memory into the module when the
load ends (vllm/model_executor/model_loader/reload/layerwise.py). If a load provides only some
tensors of a module, the others become garbage without any error. q, k and v form one module, and
so do all experts of a layer. Which tensors share a module depends on each model's own loader, but
no module spans two decoder layers. Therefore all tensors of a layer are loaded together if one
has changed. Outside of layers, all tensors with the same parent are loaded together.
"""

import re
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

_LAYER = re.compile(r".*?\blayers\.(\d+)\.")


def tensors_to_load(tensors: Collection[str], changed: Collection[str]) -> list[str]:
    """Return the names of the tensors to load when some have changed, grouped by layer.

    `tensors` contains the names of all of the policy's tensors; `changed` contains the names of
    those that have changed.
    """
    groups = {_group(name) for name in changed}
    return sorted(
        (name for name in tensors if _group(name) in groups), key=lambda name: (_group(name), name)
    )


def layers_of(tensors: Collection[str]) -> set[int]:
    """Return the indices of the decoder layers that these tensors belong to."""
    return {int(match[1]) for name in tensors if (match := _LAYER.match(name))}


def load_tensors(worker: "Worker", folder: str, tensors: list[str]) -> None:
    """Load tensors from safetensors files in place; runs in the engine's worker.

    Args:
        worker: vLLM's worker.
        folder: The folder with the safetensors files of the policy version.
        tensors: Names of the tensors, in loading order; see `tensors_to_load`.
    """
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, framework="pt"))
            for path in sorted(Path(folder).glob("*.safetensors"))
        ]
        file_of = {name: file for file in files for name in set(file.keys())}
        worker.reload_weights(
            weights_iterator=((name, file_of[name].get_tensor(name)) for name in tensors)
        )


def _group(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match else name.rpartition(".")[0]
