from collections.abc import Callable
from typing import Any, ClassVar

from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.nn import Parameter

HAVE_APEX_OR_TE: bool

class DistributedOptimizer(MegatronOptimizer):
    distributed_optimizer_instance_id: int
    gbuf_ranges: list[dict[Any, list[dict[str, Any]]]]
    model_param_group_index_map: dict[Parameter, tuple[int, int]]
    # Declared as a variable, because a patch replaces this method.
    _set_main_param_and_optimizer_states: ClassVar[
        Callable[[DistributedOptimizer, Parameter, dict[str, Tensor]], None]
    ]
    def _get_main_param_and_optimizer_states(self, model_param: Parameter) -> dict[str, Tensor]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def _init_optimizer_states_with_dummy_values(self) -> None: ...
