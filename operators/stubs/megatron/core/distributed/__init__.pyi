from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn import Module

class _ParamAndGradBuffer:
    grad_data: torch.Tensor

@dataclass
class DistributedDataParallelConfig:
    grad_reduce_in_fp32: bool = ...
    overlap_grad_reduce: bool = ...
    use_distributed_optimizer: bool = ...

class DistributedDataParallel(Module):
    ddp_config: DistributedDataParallelConfig
    buffers: list[_ParamAndGradBuffer]  # type: ignore[assignment]
    expert_parallel_buffers: list[_ParamAndGradBuffer]
    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: Module,
        disable_bucketing: bool = ...,
    ) -> None: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def broadcast_params(self) -> None: ...
    def zero_grad_buffer(self) -> None: ...

def finalize_model_grads(model: list[Module]) -> None: ...
