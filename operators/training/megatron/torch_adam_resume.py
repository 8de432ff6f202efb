"""Patches for Megatron-core 0.16.1's DistributedOptimizer, which cannot resume torch.optim.AdamW.

Its three faults occur when neither Apex nor Transformer Engine is installed, that is, on CPU. With
Transformer Engine's FusedAdam the step count is in the parameter groups and no fault occurs. The
plain (not distributed) optimizer has none of the faults. Elsewhere both functions do nothing.
"""

from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.nn import Parameter

from operators.training.megatron.optimizer import parts
from operators.training.megatron.patched import require_source

_original = DistributedOptimizer._set_main_param_and_optimizer_states


def prepare_loading(optimizer: MegatronOptimizer) -> None:
    """Prepare the loading of a state: allocate Adam's state, and allow `step` to be missing.

    1. state_dict() reads the step count from Adam's state even when that state is about to be
       loaded, and a new process has none: `assert len(steps) == 1`. A step with zero gradients
       allocates it; loading then overwrites all of it, master weights included.
    2. Loading writes every entry of Adam's state, but its callers do not pass `step`:
       KeyError: 'step'. The patch passes the existing step.
    """
    for part in _faulty(optimizer):
        if not part.optimizer.state:
            require_source(DistributedOptimizer.state_dict, "fe621ae6a622b587", "prepare_loading")
            part._init_optimizer_states_with_dummy_values()
    if DistributedOptimizer._set_main_param_and_optimizer_states is _original and _FAULTY:
        require_source(_original, "93c254228283b2df", "prepare_loading")
        DistributedOptimizer._set_main_param_and_optimizer_states = _set_with_step


def finish_loading(optimizer: MegatronOptimizer) -> None:
    """Complete the loading of a state: give each parameter its own step.

    3. Silent: load_state_dict() puts one step tensor into the state of every parameter. AdamW adds
       one to it per parameter, so in the next update each parameter has another bias correction,
       and the resumed run deviates from an uninterrupted one. (A 162nd step instead of a third, in
       a model of 159 parameters: a comparison of states must include `step`.)
    """
    for part in _faulty(optimizer):
        require_source(DistributedOptimizer.load_state_dict, "15f257b4c4f9a7ef", "finish_loading")
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


_FAULTY = not distrib_optimizer.HAVE_APEX_OR_TE


def _faulty(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    return [p for p in parts(optimizer) if _FAULTY and isinstance(p, DistributedOptimizer)]


def _set_with_step(
    self: DistributedOptimizer, model_param: Parameter, tensors: dict[str, Tensor]
) -> None:
    group, order = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
    _original(self, model_param, {"step": state["step"], **tensors})
