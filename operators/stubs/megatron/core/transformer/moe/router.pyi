from collections.abc import Callable
from typing import ClassVar

from torch import Tensor
from torch.nn import Module

class TopKRouter(Module):
    enable_expert_bias: bool
    local_tokens_per_expert: Tensor
    router_replay: object
    # Declared as a variable, because a patch replaces this method.
    _apply_expert_bias: ClassVar[Callable[[TopKRouter, Tensor, Tensor | None], None]]
