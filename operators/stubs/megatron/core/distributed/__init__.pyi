from contextlib import AbstractContextManager
from dataclasses import dataclass

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.transformer import TransformerConfig
from torch.nn import Module

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
