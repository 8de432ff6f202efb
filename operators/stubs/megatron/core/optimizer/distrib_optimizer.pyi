from collections.abc import Callable
from typing import Any, ClassVar

from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.nn import Parameter

HAVE_APEX_OR_TE: bool

class DistributedOptimizer(MegatronOptimizer):
    model_param_group_index_map: dict[Parameter, tuple[int, int]]
    # A variable, because a patch replaces it.
    _set_main_param_and_optimizer_states: ClassVar[
        Callable[[DistributedOptimizer, Parameter, dict[str, Tensor]], None]
    ]
    def state_dict(self) -> dict[str, Any]: ...
    def _init_optimizer_states_with_dummy_values(self) -> None: ...
