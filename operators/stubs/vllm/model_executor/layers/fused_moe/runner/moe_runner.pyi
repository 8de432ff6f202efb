from typing import Any

from torch.nn import Module

# The kernel that vLLM chose for the experts, and the kernel's parts.
_ExpertsMethod = Any

class MoERunner(Module):
    routed_experts: Module
    @property
    def layer_id(self) -> int: ...
    @property
    def _quant_method(self) -> _ExpertsMethod: ...
