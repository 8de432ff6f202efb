"""Passes of a tiny model with Megatron's schedules."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from operators.training.megatron.model import LoadedModel, TrainedModel


def run(model: LoadedModel, micro_batches: int, length: int, **how: Any) -> list[Any]:
    """Run Megatron's schedule for the current layout.

    Args:
        model: The model.
        micro_batches: The number of micro-batches.
        length: The sequence length in tokens.
        how: Further arguments of the schedule, such as forward_step_func and forward_only.

    Returns:
        The schedule's results on the last pipeline stage; an empty list elsewhere.
    """
    several = len(model.chunks) > 1
    indices: list[Iterator[int]] = [iter(range(micro_batches)) for _ in model.chunks]
    return get_forward_backward_func()(
        data_iterator=indices if several else indices[0],
        model=model.chunks if several else model.chunks[0],
        num_microbatches=micro_batches,
        seq_length=length,
        micro_batch_size=1,
        **how,
    )


def device_of(model: LoadedModel) -> torch.device:
    """Return the device of a model's weights."""
    return next(model.chunks[0].parameters()).device


def forward_logits(model: LoadedModel, tokens_BN: torch.Tensor) -> torch.Tensor | None:
    """Return logits over the full vocabulary on the last pipeline stage; None elsewhere.

    Tokens and logits are on the CPU, and the model may be on a GPU.
    """
    tokens_BN = tokens_BN.to(device_of(model))
    positions_N = torch.arange(tokens_BN.shape[1], device=tokens_BN.device)

    def step(_: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
        output = chunk(tokens_BN, positions_N[None], None)
        return output, lambda logits, non_loss_data: gather_from_tensor_model_parallel_region(
            logits
        )

    with torch.no_grad():
        results = run(
            model,
            # Interleaved stages need at least one micro-batch for each rank.
            parallel_state.get_pipeline_model_parallel_world_size(),
            tokens_BN.shape[1],
            forward_step_func=step,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return results[0].float().cpu() if results else None


def train(model: TrainedModel, tokens_MBN: torch.Tensor) -> None:
    """Train one optimizer step on micro-batches of tokens, where each token predicts the next."""
    micro_batches, _, length = tokens_MBN.shape
    length -= 1
    tokens_MBN = tokens_MBN.to(device_of(model))
    positions_N = torch.arange(length, device=tokens_MBN.device)
    counted = torch.full((), length, dtype=torch.int, device=tokens_MBN.device)

    def step(indices: Iterator[int], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        rows = tokens_MBN[next(indices)]
        losses = chunk(rows[:, :-1], positions_N[None], None, labels=rows[:, 1:])
        return losses, lambda out: (out.float().sum(), counted.clone(), {})

    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()
    run(model, micro_batches, length, forward_step_func=step, forward_only=False)
    done, _, _ = model.optimizer.step()
    assert done
