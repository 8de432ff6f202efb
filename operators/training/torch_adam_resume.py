"""Megatron-core 0.16.1's DistributedOptimizer over torch.optim.AdamW cannot resume: three faults.

They are on the path taken when neither Apex nor Transformer Engine is installed, so on CPU; with
Transformer Engine's FusedAdam the step count lives in the parameter groups and none of them shows.
The plain (not distributed) optimizer has none of them. Both functions do nothing elsewhere.
"""

from typing import Any

from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from operators.training.optimizer import parts
from operators.training.patched import require_source

_original = DistributedOptimizer._set_main_param_and_optimizer_states


def prepare_loading(optimizer: Any) -> None:
    """Before loading a state: make room for it, and let loading leave `step` out.

    1. state_dict() reads the step count from Adam's state even when that state is about to be
       loaded, and a new process has none: `assert len(steps) == 1`. A step with zero gradients
       allocates it; loading then overwrites all of it, master weights included.
    2. Loading writes every entry of Adam's state, but its callers leave `step` out of what they
       pass: KeyError: 'step'. The step that is there is passed.
    """
    for part in _faulty(optimizer):
        if not part.optimizer.state:
            require_source(DistributedOptimizer.state_dict, "fe621ae6a622b587", "prepare_loading")
            part._init_optimizer_states_with_dummy_values()
    if DistributedOptimizer._set_main_param_and_optimizer_states is _original and _FAULTY:
        require_source(_original, "93c254228283b2df", "prepare_loading")
        DistributedOptimizer._set_main_param_and_optimizer_states = _set_with_step


def finish_loading(optimizer: Any) -> None:
    """After loading a state: give each parameter its own step.

    3. Silent: load_state_dict() puts one step tensor into the state of every parameter. AdamW adds
       one to it per parameter, so in the next update each parameter has another bias correction,
       and the resumed run leaves the undisturbed one. (A 162nd step instead of a third, in a model
       of 159 parameters: a comparison of states must include `step`.)
    """
    for part in _faulty(optimizer):
        require_source(DistributedOptimizer.load_state_dict, "15f257b4c4f9a7ef", "finish_loading")
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


_FAULTY = not distrib_optimizer.HAVE_APEX_OR_TE


def _faulty(optimizer: Any) -> list[Any]:
    return [p for p in parts(optimizer) if _FAULTY and isinstance(p, DistributedOptimizer)]


def _set_with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    group, order = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
    _original(self, model_param, {"step": state["step"], **tensors})
