"""The output layer, applied by the loss instead of the model, to avoid logits [T, vocabulary].

Within `without_logits` the last chunk of the model returns its final hidden states.
`passes.logprobs` multiplies them by `output_weight`, a limited number of tokens at a time. A value
head stays in the model, because its output is only one number per position.
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
    """Make the chunk with the output layer return hidden states [B, M, H] instead of logits.

    A chunk with a value head still returns values, [B, M, 1]. Every rank of a tensor-parallel group
    receives the hidden states of all positions. Their gradient is summed over the group, as in the
    output layer itself.
    """
    outputs: list[Any] = [bare(c).output_layer for c in chunks if bare(c).post_process]
    layers = [layer for layer in outputs if not isinstance(layer, ValueHead)]
    for layer in layers:
        layer.forward = partial(_hidden, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # restores the method of the class


def output_weight(chunks: Sequence[torch.nn.Module]) -> torch.Tensor | None:
    """Return this rank's part of the output layer's weight, [V, H]; None on earlier stages."""
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
