"""The value head of PPO's critic, which replaces a model's output layer.

The value head follows mbridge's make_value_model: a linear layer with one output and no bias.
Every tensor-parallel rank holds the entire layer. Under sequence parallelism each rank computes the
values of its positions, and Megatron sums the weight's gradient over the ranks.

Two things differ from mbridge. Products are computed in float32 instead of the weights' dtype. The
weight is drawn from a seed instead of the process's generator, so that it is the same in every
layout.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

NAME = "output_layer.weight"
"""The name of the value head's weight among the parameters of the last chunk."""


class ValueHead(torch.nn.Linear):
    """A layer that computes one value per position: [M, B, H] -> [M, B, 1], float32."""

    def __init__(self, config: TransformerConfig, seed: int, group: Any) -> None:
        """Draw the weight from U(-1/sqrt(H), 1/sqrt(H)), as torch's Linear does by default.

        `group` is the group of tensor-parallel ranks.
        """
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        bound = 1 / math.sqrt(config.hidden_size)
        drawn = torch.empty(1, config.hidden_size, device="cpu")
        drawn.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.weight.copy_(drawn)
        self.group = group
        self.sequence_parallel = config.sequence_parallel
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel  # Megatron then sums its gradient

    def forward(  # type: ignore[override]
        self, hidden_MBH: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, None]:
        """Return the values, and None in place of a bias, as Megatron's output layer does."""
        values_MB1 = torch.nn.functional.linear(hidden_MBH.float(), self.weight.float())
        if self.sequence_parallel:
            values_MB1 = gather_from_sequence_parallel_region(
                values_MB1, tensor_parallel_output_grad=False, group=self.group
            )
        return values_MB1, None


def with_value_head(seed: int) -> Callable[..., None]:
    """Return a function that puts a value head into the last chunk; mbridge passes all chunks."""

    def put(model: Any, *, post_process: bool, config: TransformerConfig, **_: object) -> None:
        if post_process:
            model.output_layer = ValueHead(config, seed, model.output_layer.tp_group)

    return put
