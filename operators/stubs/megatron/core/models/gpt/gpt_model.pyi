from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlock
from torch.nn import Module

class GPTModel(Module):
    decoder: TransformerBlock
    def sharded_state_dict(self, *, metadata: dict[str, Any]) -> dict[str, Any]: ...
