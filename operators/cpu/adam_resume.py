"""Patches for Megatron-core 0.16.1's DistributedOptimizer, which cannot resume torch.optim.AdamW.

The docstrings below describe three faults. They occur only without Apex and Transformer Engine,
which are missing on CPU. Transformer Engine's FusedAdam avoids the faults, because it keeps the
step count in the parameter groups. The plain (not distributed) optimizer does not have these
faults. With FusedAdam or the plain optimizer, the functions do nothing.
"""

from collections.abc import Iterable

from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.nn import Parameter

from operators.patches import require_source

_original = DistributedOptimizer._set_main_param_and_optimizer_states


def prepare_loading(parts: Iterable[MegatronOptimizer]) -> None:
    """Prepare to load a state: allocate Adam's state, and allow `step` to be missing.

    1. state_dict() reads the step count from Adam's state even when that state is about to be
       loaded. A new process does not have a state yet, so `assert len(steps) == 1` fails. A step
       with zero gradients allocates the state. Loading then overwrites all of it, including master
       weights.
    2. Loading writes every entry of Adam's state, but its callers do not pass `step`. The result is
       KeyError: 'step'. The patch passes the existing step.
    """
    for part in _faulty(parts):
        if not part.optimizer.state:
            require_source(DistributedOptimizer.state_dict, "fe621ae6a622b587", "prepare_loading")
            part._init_optimizer_states_with_dummy_values()
    if DistributedOptimizer._set_main_param_and_optimizer_states is _original and _FAULTY:
        require_source(_original, "93c254228283b2df", "prepare_loading")
        DistributedOptimizer._set_main_param_and_optimizer_states = _set_with_step


def finish_loading(parts: Iterable[MegatronOptimizer]) -> None:
    """Finish loading a state: give each parameter its own step.

    3. The third fault is silent. load_state_dict() puts the same step tensor into the state of
       every parameter. AdamW adds one to it for each parameter, so in the next update every
       parameter has a different bias correction. The resumed run deviates from an uninterrupted
       one. In a model with 159 parameters, the step was 162 instead of 3. A comparison of states
       must therefore include `step`.
    """
    for part in _faulty(parts):
        require_source(DistributedOptimizer.load_state_dict, "15f257b4c4f9a7ef", "finish_loading")
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


_FAULTY = not distrib_optimizer.HAVE_APEX_OR_TE


def _faulty(parts: Iterable[MegatronOptimizer]) -> list[DistributedOptimizer]:
    return [p for p in parts if _FAULTY and isinstance(p, DistributedOptimizer)]


def _set_with_step(
    self: DistributedOptimizer, model_param: Parameter, tensors: dict[str, Tensor]
) -> None:
    group, order = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
    _original(self, model_param, {"step": state["step"], **tensors})
