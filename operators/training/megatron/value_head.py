"""The value head of PPO's critic, in the place of a model's output layer.

As in mbridge's make_value_model: a linear layer to one number, without a bias, which every
tensor-parallel rank holds whole. Under sequence parallelism each of these ranks computes the values
of its positions, and Megatron sums the weight's gradient over them. Two things differ: products are
in float32, not in the weights' type, and the weight is drawn from a seed, not from the process's
generator, so that it is the same in every layout.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

NAME = "output_layer.weight"
"""The value head's weight among the parameters of the last chunk."""


class ValueHead(torch.nn.Linear):
    """One value of each position: [M, B, H] -> [M, B, 1], float32."""

    def __init__(self, config: TransformerConfig, seed: int, group: Any) -> None:
        """Draw the weight from U(-1/sqrt(H), 1/sqrt(H)), as torch's Linear does by default.

        `group` holds the tensor-parallel ranks.
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
        """Values, and None in the place of a bias, as Megatron's output layer returns them."""
        values_MB1 = torch.nn.functional.linear(hidden_MBH.float(), self.weight.float())
        if self.sequence_parallel:
            values_MB1 = gather_from_sequence_parallel_region(
                values_MB1, tensor_parallel_output_grad=False, group=self.group
            )
        return values_MB1, None


def with_value_head(seed: int) -> Callable[..., None]:
    """What mbridge calls with each chunk that it has made: put a value head into the last."""

    def put(model: Any, *, post_process: bool, config: TransformerConfig, **_: object) -> None:
        if post_process:
            model.output_layer = ValueHead(config, seed, model.output_layer.tp_group)

    return put
