from collections.abc import Callable

from torch import Tensor
from torch.nn import Module

class RotaryEmbedding(Module):
    _forward_method: Callable[..., tuple[Tensor, Tensor | None]]
    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = ...
    ) -> tuple[Tensor, Tensor | None]: ...
