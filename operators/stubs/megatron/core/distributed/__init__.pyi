from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig
from torch.nn import Module

@dataclass
class DistributedDataParallelConfig:
    grad_reduce_in_fp32: bool = ...
    use_distributed_optimizer: bool = ...

class DistributedDataParallel(Module):
    ddp_config: DistributedDataParallelConfig
    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: Module,
        disable_bucketing: bool = ...,
    ) -> None: ...
    def broadcast_params(self) -> None: ...
    def zero_grad_buffer(self) -> None: ...

def finalize_model_grads(model: list[Module]) -> None: ...
