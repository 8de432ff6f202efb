"""The output layer, applied by the loss instead of the model, so that [T, vocabulary] never exists.

Within `without_logits` the last stage's chunk returns its final hidden states; `passes.logprobs`
multiplies them with `output_weight`, a chunk of tokens at a time. A value head stays in the model:
its output is one number per position.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from operators.training.megatron.model import bare
from operators.training.megatron.value_head import ValueHead


@contextlib.contextmanager
def without_logits(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Have the chunk that holds the output layer return hidden states [B, M, H], not logits.

    One with a value head returns values, [B, M, 1]. Every rank of a tensor-parallel group gets the
    whole hidden states, and their gradient is the sum over the group, as the output layer itself
    arranges it.
    """
    outputs: list[Any] = [bare(c).output_layer for c in chunks if bare(c).post_process]
    layers = [layer for layer in outputs if not isinstance(layer, ValueHead)]
    for layer in layers:
        layer.forward = partial(_hidden, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own


def output_weight(chunks: Sequence[torch.nn.Module]) -> torch.Tensor | None:
    """This rank's part of the output layer's weight, [V, H]; None off the last stage."""
    for chunk in chunks:
        model: Any = bare(chunk)
        if model.post_process:
            tied = model.share_embeddings_and_output_weights
            weight: torch.Tensor = (
                model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
            )
            return weight
    return None


def _hidden(layer: Any, hidden_MBH: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
    if layer.sequence_parallel:
        return gather_from_sequence_parallel_region(
            hidden_MBH, tensor_parallel_output_grad=True, group=layer.tp_group
        ), None
    return copy_to_tensor_model_parallel_region(hidden_MBH, group=layer.tp_group), None
