"""Passes over a tiny model, through Megatron's schedules."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from operators.training.megatron.model import TrainedModel


def run(model: TrainedModel, micro_batches: int, length: int, **how: Any) -> list[Any]:
    """Megatron's schedule for this layout; `how` has forward_step_func and forward_only."""
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


def forward_logits(model: TrainedModel, tokens_BN: torch.Tensor) -> torch.Tensor | None:
    """Logits over the whole vocabulary on the last pipeline stage, None elsewhere."""

    def step(_: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
        output = chunk(tokens_BN, torch.arange(tokens_BN.shape[1])[None], None)
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
    return results[0].float() if results else None


def train(model: TrainedModel, tokens_MBN: torch.Tensor) -> None:
    """One optimizer step on micro-batches of tokens, each predicting the next."""
    micro_batches, _, length = tokens_MBN.shape
    length -= 1

    def step(indices: Iterator[int], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        rows = tokens_MBN[next(indices)]
        losses = chunk(rows[:, :-1], torch.arange(length)[None], None, labels=rows[:, 1:])
        return losses, lambda out: (out.float().sum(), torch.tensor(length, dtype=torch.int), {})

    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()
    run(model, micro_batches, length, forward_step_func=step, forward_only=False)
    done, _, _ = model.optimizer.step()
    assert done
