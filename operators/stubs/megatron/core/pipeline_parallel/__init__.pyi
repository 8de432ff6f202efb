from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module

class _ForwardBackward(Protocol):
    """A function that returns the forward steps' results on the last pipeline stage."""

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., tuple[Tensor, Callable[..., object]]],
        data_iterator: object,
        model: Module | list[Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool,
        collect_non_loss_data: bool,
    ) -> list[Any]: ...

def get_forward_backward_func() -> _ForwardBackward: ...
