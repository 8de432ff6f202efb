"""A model's training state in the form that Megatron's distributed checkpoints save and load.

The state of random number generators is not included, because training draws no random numbers
(build_model refuses dropout).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from operators.cpu.adam_resume import finish_loading, prepare_loading
from operators.training.megatron.checkpoint.optimizer_state import (
    HeldState,
    allocate,
    distributed_parts,
    held_state,
    put_state,
    shards_of,
    steps_in,
)
from operators.training.megatron.model import TrainedModel
from operators.training.megatron.optimizer import parts

CRITIC = "critic-"
"""The prefix of the critic's files; Megatron uses the same file names for every model."""
_SHARDS = "optimizer_shards"
_METADATA: dict[str, Any] = {
    # If Megatron's optimizers are not distributed, this makes the dense and the expert optimizer
    # share one key space.
    "chained_optim_avoid_prefix": True,
}


def saved_state(version: int, model: TrainedModel) -> dict[str, Any]:
    """Return the state that this rank saves. Every rank must call this."""
    steps = _steps(model)
    state = {**_of_chunks(model), "version": version, "stepped": steps > 0, "steps": steps}
    if not steps:
        return state
    optimizers = distributed_parts(model.optimizer)
    if optimizers is None:
        return state | {"optimizer": _of_optimizer(model, state, is_loading=False)}
    return state | {_SHARDS: shards_of(held_state(optimizers), state)}


@dataclass(frozen=True)
class WantedState:
    """The state that this rank loads."""

    state: dict[str, Any]
    """The state dict for Megatron, with the tensors that receive the loaded data."""
    held: Sequence[HeldState]
    """This rank's part of the optimizer state; empty unless the optimizer is distributed."""


def wanted_state(model: TrainedModel, stepped: bool) -> WantedState:
    """Return the state that this rank loads, with optimizer state if `stepped` is true."""
    state = _of_chunks(model)
    if not stepped:
        return WantedState(state, [])
    prepare_loading(parts(model.optimizer))
    optimizers = distributed_parts(model.optimizer)
    if optimizers is None:
        state["optimizer"] = _of_optimizer(model, state, is_loading=True)
        return WantedState(state, [])
    allocate(optimizers)
    held = held_state(optimizers)
    return WantedState({**state, _SHARDS: shards_of(held, state)}, held)


def put_loaded(
    model: TrainedModel, wanted: WantedState, loaded: dict[str, Any], stepped: bool
) -> None:
    """Put the loaded state into the model and its optimizer.

    Args:
        model: The model and its optimizer.
        wanted: The result of `wanted_state`.
        loaded: The state that Megatron has loaded.
        stepped: Whether the checkpoint contains optimizer state.
    """
    for index, chunk in enumerate(model.bare_chunks):
        chunk.load_state_dict(loaded[f"model{index}"])
    if not stepped:
        return
    if distributed_parts(model.optimizer) is None:
        model.optimizer.load_state_dict(loaded["optimizer"])
    else:
        # Checkpoints in Megatron's format keep the step count in the optimizer's parameter groups.
        steps = loaded["steps"] if "steps" in loaded else max(steps_in(loaded["optimizer"]))
        put_state(wanted.held, steps)
    finish_loading(parts(model.optimizer))


def _of_chunks(model: TrainedModel) -> dict[str, Any]:
    return {
        f"model{index}": chunk.sharded_state_dict(metadata=dict(_METADATA))
        for index, chunk in enumerate(model.bare_chunks)
    }


def _of_optimizer(model: TrainedModel, chunks: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    # The optimizer finds its parameters in the nested entries of the chunks by identity. In one
    # flat dict, the chunks of a virtual pipeline would overwrite each other.
    return model.optimizer.sharded_state_dict(
        dict(chunks), is_loading=is_loading, metadata=dict(_METADATA)
    )


def _steps(model: TrainedModel) -> int:
    """Return the number of optimizer steps; 0 if the optimizer has no state to save.

    Every rank must call this. The number is 0 for a policy while only its critic is trained, or if
    every mini-batch was skipped. The float32 weights are then still the initial weights. Ranks that
    hold no part of the state return the same number.
    """
    found = 0
    for part in parts(model.optimizer):
        if part.optimizer.state:
            found = max(found, 1, *steps_in(part.state_dict()))
    device = next(model.chunks[0].parameters()).device
    steps = torch.tensor(found, device=device)
    torch.distributed.all_reduce(steps, op=torch.distributed.ReduceOp.MAX)
    return int(steps)
