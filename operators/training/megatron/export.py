"""Exports the trained model: converts Megatron's tensors, spread over many ranks, to HF tensors.

mbridge provides the names, the slicing of tensors and the conversion. Its own export sends every
tensor through every pipeline stage to all ranks. Here, the ranks of one tensor-parallel group send
a tensor to one rank, its owner. `operators/training/publish` chooses the owners.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from mbridge.core.llm_bridge import LLMBridge
from megatron.core import parallel_state
from safetensors import safe_open
from torch.distributed import ProcessGroup

from operators.training.megatron.model import LoadedModel
from operators.training.megatron.weights import (
    NamedForBridge,
    of_untrained_layer,
    weight_files,
)
from pipeline.policies.weights import TensorPlace

_CODES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""The names of dtypes in safetensors files."""
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_EXPERT = ".mlp.experts.linear_fc"


class RankPlace(NamedTuple):
    """The place of a rank in the parallel layout. Example: RankPlace(0, 1, 0, 0, 1, 0)."""

    stage: int
    """Pipeline stage."""
    tensor: int
    """Tensor-parallel rank."""
    replica: int
    """Index among the data- and context-parallel ranks, which hold the same dense tensors."""
    expert: int
    """Expert-parallel rank."""
    expert_tensor: int
    """Expert-tensor-parallel rank."""
    expert_replica: int
    """Index among the ranks that hold the same experts."""


@dataclass(frozen=True)
class HeldTensor:
    """A Megatron tensor on this rank, and the Hugging Face tensors into which it is converted."""

    name: str
    """mbridge's name; unique across stages and experts."""
    tensor: Callable[[], torch.Tensor]
    """A function that returns the current tensor, because Megatron may replace an expert bias."""
    group: ProcessGroup | None
    """The ranks that each hold a slice of the tensor; None if this rank holds all of it."""
    is_expert: bool
    made: tuple[TensorPlace, ...]
    """The Hugging Face tensors; `begin` and `end` are byte offsets from the first of them."""

    @property
    def size(self) -> int:
        """Return the total size of the Hugging Face tensors, in bytes."""
        return self.made[-1].end

    def exported(
        self, bridge: LLMBridge, owner: int, owner_place: RankPlace, here: RankPlace
    ) -> Iterator[memoryview]:
        """On the owner, yield the Hugging Face tensors' bytes; elsewhere, send this rank's slice.

        The owner and all ranks of its group must call this. On all other ranks, a call has no
        effect.

        Args:
            bridge: The model's bridge, which converts the tensors.
            owner: The rank that owns the tensor.
            owner_place: The place of the owner.
            here: The place of this rank.
        """
        owns = owner == torch.distributed.get_rank()
        is_member = (
            owner_place.expert_replica == here.expert_replica
            if self.is_expert
            else owner_place.replica == here.replica
        )
        if not owns and (self.group is None or not is_member):
            return
        param = self.tensor()
        parts = [param.detach()]
        if self.group is not None:
            parts = _gather(parts[0].contiguous(), owner, self.group)
        if owns:
            made = _made(bridge, self.name, parts, param)
            for place, (_, tensor) in zip(self.made, made, strict=True):
                yield _bytes(tensor, _DTYPES[place.dtype])


@dataclass(frozen=True)
class UntrainedTensor:
    """A tensor that is copied from the source, because Megatron does not build its layer."""

    file: Path
    made: TensorPlace

    def exported(self) -> memoryview:
        """Return the tensor's bytes."""
        with safe_open(self.file, framework="pt") as source:
            tensor: torch.Tensor = source.get_tensor(self.made.name)
        return _bytes(tensor, tensor.dtype)


def rank_place() -> RankPlace:
    """Return this rank's place in the parallel layout."""
    return RankPlace(
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
    )


def held_tensors(model: LoadedModel, source: Path) -> Iterator[HeldTensor]:
    """Yield the tensors that this rank holds and exports, in the order of the model.

    `source` is the Hugging Face folder that the model was loaded from.
    """
    bridge, files = model.bridge, weight_files(source)
    tied = bridge.hf_config.tie_word_embeddings
    experts = parallel_state.get_expert_tensor_parallel_group()
    dense = parallel_state.get_tensor_model_parallel_group()
    for chunk in model.bare_chunks:
        view = NamedForBridge(chunk)
        found: dict[str, Callable[[], torch.Tensor]] = {
            name: partial(_itself, parameter) for name, parameter in view.named_parameters()
        }
        # An expert bias is a buffer, not a parameter.
        biases = (name for name in view.state_dict() if "expert_bias" in name)
        found |= {name: partial(chunk.get_buffer, name) for name in biases}
        names = bridge._weight_name_mapping_mcore_local_to_global(view)
        for local, look_up in found.items():
            name, tensor = names[local], look_up()
            if tied and name == "output_layer.weight":
                continue  # the last stage's copy; the first stage exports the embeddings
            is_expert = _EXPERT in name
            group = experts if is_expert else dense
            is_cut = is_expert or getattr(tensor, "tensor_model_parallel", False)
            count = group.size() if is_cut else 1
            blank = [torch.empty_like(tensor, device="meta") for _ in range(count)]
            made: list[TensorPlace] = []
            for hf, of in _made(bridge, name, blank, tensor):
                code = _CODES[bridge.dtype]
                if hf.endswith("e_score_correction_bias"):
                    code = _place_in(source / files[hf], hf).dtype
                begin = made[-1].end if made else 0
                size = of.numel() * _DTYPES[code].itemsize
                made.append(TensorPlace(hf, code, tuple(of.shape), begin, begin + size))
            yield HeldTensor(name, look_up, group if count > 1 else None, is_expert, tuple(made))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def untrained_tensors(model: LoadedModel, source: Path) -> Iterator[UntrainedTensor]:
    """Yield the tensors of a Hugging Face folder that no rank holds."""
    layers = model.bridge.hf_config.num_hidden_layers
    for name, file in sorted(weight_files(source).items()):
        if of_untrained_layer(name, layers):
            yield UntrainedTensor(source / file, _place_in(source / file, name))


def _made(
    bridge: LLMBridge, name: str, parts: list[torch.Tensor], param: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    """Return the Hugging Face names and tensors into which the slices of a tensor are converted."""
    whole = parts[0] if len(parts) == 1 else _merged(bridge, name, parts, param)
    names, tensors = bridge._weight_to_hf_format(name, whole)
    return list(zip(names, tensors, strict=True))


def _merged(
    bridge: LLMBridge, name: str, parts: list[torch.Tensor], param: torch.Tensor
) -> torch.Tensor:
    """Join the slices of a tensor.

    With TP1, mbridge assumes that experts are whole, even if expert tensor parallelism splits them.
    """
    if _EXPERT not in name or bridge.mpu.tp_size > 1:
        return bridge._weight_merge_across_tp(name, parts, param)
    if "linear_fc2" in name:
        return torch.cat(parts, dim=1)
    halves = [part.chunk(2) for part in parts]  # gate and up
    return torch.cat([half[i] for i in range(2) for half in halves])


def _gather(part: torch.Tensor, owner: int, group: ProcessGroup) -> list[torch.Tensor]:
    """Return the slices of a group's ranks, in order, on the owner; elsewhere an empty list."""
    owns = owner == torch.distributed.get_rank()
    parts = [torch.empty_like(part) for _ in range(group.size())] if owns else None
    torch.distributed.gather(part, parts, dst=owner, group=group)
    return parts or []


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview:
    """Copy a tensor's bytes to host memory, because training continues while they are written."""
    copied = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    return copied.reshape(-1).view(torch.uint8).numpy().data


def _place_in(file: Path, name: str) -> TensorPlace:
    with safe_open(file, framework="pt") as source:
        of = source.get_slice(name)
        tensor: torch.Tensor = source.get_tensor(name)
        return TensorPlace(name, of.get_dtype(), tuple(of.get_shape()), 0, tensor.nbytes)
