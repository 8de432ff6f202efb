"""The state of Megatron's DistributedOptimizer, divided into boxes of the weights.

    flat shard of a rank:   [......|---- weight A ----|-- weight B --|.......]
    box:                           tensor optimizer.state.exp_avg.A, offset, shape

A data-parallel rank holds float32 weights and moments for a range of the flattened weights. Each
range is divided into boxes of the full model's weights, and each box is a shard of
`optimizer.state.<name>.<weight>`. A rank therefore writes only the state that it holds, and
reads only the state that it will hold, whatever the saved layout was. No rank ever holds another
rank's state.

Megatron-core 0.16.1 offers two other formats. 'fully_reshardable' stores the same tensors but has
to gather them. Saving gathers them on one rank of each data-parallel group, and loading gathers
full weights on every rank. 'dp_reshardable' does not gather tensors, but stores flat buckets. These
can be read only with the same tensor-, pipeline- and expert-parallel sizes, and Megatron asserts
that no rank's part of a bucket is empty. Earlier releases of Retrace wrote 'fully_reshardable'.
Those checkpoints can still be read, because their tensors have the same names.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.nn import Parameter

from operators.training.megatron.checkpoint.boxes import boxes_of
from operators.training.megatron.optimizer import parts

_PREFIX = "optimizer.state"


@dataclass(frozen=True)
class HeldState:
    """The part of one weight's optimizer state that a rank holds."""

    part: DistributedOptimizer
    parameter: Parameter
    """The rank's parameter; with tensor or expert parallelism, a slice of the model's weight."""
    begin: int
    """The first element of the range, in the flattened parameter."""
    end: int
    """The element after the last element of the range."""
    tensors: Mapping[str, Tensor]
    """The float32 weight (`param`) and the moments, each [end - begin]."""


def distributed_parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer] | None:
    """Return the distributed optimizers of which this rank holds a part.

    The result is None if the optimizer is not distributed. Its state then has the shapes of the
    weights, and a rank holds the state for all its weights.
    """
    found = [part for part in parts(optimizer) if isinstance(part, DistributedOptimizer)]
    return [part for part in found if any(_ranges(part))] if found else None


def allocate(optimizers: Sequence[DistributedOptimizer]) -> None:
    """Allocate Adam's state with arbitrary content, so that a checkpoint can be loaded into it."""
    for part in optimizers:
        part.load_state_dict(part.state_dict())


def held_state(optimizers: Sequence[DistributedOptimizer]) -> list[HeldState]:
    """Return this rank's part of the optimizer state, without the step count."""
    return [
        HeldState(part, parameter, begin, end, _tensors(part, parameter))
        for part in optimizers
        for parameter, begin, end in _ranges(part)
    ]


def _ranges(part: DistributedOptimizer) -> Iterator[tuple[Parameter, int, int]]:
    for of_dtypes in part.gbuf_ranges:
        for buckets in of_dtypes.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _tensors(part: DistributedOptimizer, parameter: Parameter) -> dict[str, Tensor]:
    held = part._get_main_param_and_optimizer_states(parameter)
    # `step` is a scalar, the same for all weights.
    return {name: tensor.detach() for name, tensor in held.items() if tensor.ndim}


def shards_of(held: Sequence[HeldState], of_model: dict[str, Any]) -> dict[str, ShardedTensor]:
    """Return the boxes of the state, as views of its tensors.

    `of_model` is the model's sharded state. The keys of the result are numbers, which only this
    process uses. Raises RuntimeError for a weight whose parts are not contiguous.
    """
    sharded, _ = extract_sharded_tensors_and_factories(of_model)
    of_parameters = {entry.data: entry for entry in nested_values(sharded)}
    found: dict[str, ShardedTensor] = {}
    for one in held:
        for box, begin in _boxes(one, of_parameters[one.parameter]):
            for name, flat in one.tensors.items():
                count = torch.Size(box.local_shape).numel()
                found[str(len(found))] = replace(
                    box,
                    key=f"{_PREFIX}.{name}.{box.key}",
                    data=flat[begin : begin + count].view(box.local_shape),
                    dtype=flat.dtype,
                    replica_id=(*box.replica_id[:2], one.part.distributed_optimizer_instance_id),
                )
    return found


def _boxes(held: HeldState, entry: Any) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield the boxes of a range, without data, each with its offset in the range."""
    for place, first in _places(entry, held.parameter):
        shape = tuple(place.local_shape)
        last = first + torch.Size(shape).numel()
        begin, end = max(held.begin, first), min(held.end, last)
        at = begin - held.begin
        for box in boxes_of(shape, begin - first, end - first):
            ahead = place.prepend_axis_num
            inner = place.global_offset[ahead:]
            yield (
                replace(
                    place,
                    data=None,
                    local_shape=(*(1 for _ in range(ahead)), *box.shape),
                    global_offset=(
                        *place.global_offset[:ahead],
                        *(a + b for a, b in zip(inner, box.offset, strict=True)),
                    ),
                    axis_fragmentations=None,
                    prepend_axis_num=0,
                    allow_shape_mismatch=False,
                ),
                at,
            )
            at += box.numel


def _places(entry: Any, parameter: Parameter) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield the parts of the full model's tensors that a parameter holds.

    Each part comes with the index of its first element in the flattened parameter. Most parameters
    hold one part. For the others, Megatron has a factory. For example, the gate and up projections
    are a single parameter, but two separate parts of one tensor.
    """
    if isinstance(entry, ShardedTensor):
        yield entry, 0
        return
    assert isinstance(entry, ShardedTensorFactory)
    outline = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    for made in nested_values(replace(entry, data=outline).build()):
        view = made.data
        if view._base is not outline or not view.is_contiguous():
            raise RuntimeError(
                f"checkpoint: {made.key} is not a contiguous part of its parameter of shape "
                f"{tuple(parameter.shape)}, so its optimizer state cannot be divided into boxes; "
                "this code does not support the way that Megatron-core stores this kind of layer"
            )
        yield made, view.storage_offset()


@torch.no_grad()
def put_state(held: Sequence[HeldState], step: int) -> None:
    """Put loaded state into the optimizers: the tensors of `held` and the step count."""
    optimizers = {id(one.part): one.part for one in held}
    for part in optimizers.values():
        state = part.state_dict()
        for group in state["optimizer"]["param_groups"]:
            group["step"] = step
        part.load_state_dict(state)
    for one in held:
        one.part._set_main_param_and_optimizer_states(one.parameter, dict(one.tensors))
    for part in optimizers.values():
        if hasattr(part.optimizer, "_sync_hdo_state_to_sub_optimizers"):
            part.optimizer._sync_hdo_state_to_sub_optimizers()


def steps_in(state: Any) -> Iterator[int]:
    """Yield the step counts in the parameter groups of an optimizer's nested state."""
    if isinstance(state, dict):
        for group in state.get("param_groups", ()):
            if group.get("step") is not None:
                yield int(group["step"])
        for value in state.values():
            yield from steps_in(value)
