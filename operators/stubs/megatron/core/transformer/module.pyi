from megatron.core.transformer import TransformerConfig
from torch.nn import Module

class Float16Module(Module):
    def __init__(self, config: TransformerConfig, module: Module) -> None: ...
