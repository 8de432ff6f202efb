"""The parallel layout of a checkpoint, and the check that a different layout can load it."""

from typing import Any

from megatron.core import parallel_state

from operators.training.megatron.model import TrainedModel
from pipeline.errors import InputError
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError

REMOVE = "remove this checkpoint to start from the previous one"
"""The fix for a damaged checkpoint."""


def layout(model: TrainedModel) -> dict[str, Any]:
    """Return the parallel layout of a model, for the commit of a checkpoint.

    Some keys restrict loading; the others only inform readers.
    """
    config = model.config
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "virtual_pipeline": config.virtual_pipeline_model_parallel_size or 1,
        "data": parallel_state.get_data_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "distributed_optimizer": model.chunks[0].ddp_config.use_distributed_optimizer,
        "dtype": str(config.params_dtype).removeprefix("torch."),
    }


_FIXED = {
    "distributed_optimizer": "use_distributed_optimizer",
    "dtype": "dtype",
}
_EXPERT = {
    # With EP1 there is one optimizer. With EP2 there are two (dense and expert), so Megatron's
    # state differs in shape.
    "expert": "expert_model_parallel_size",
}


def refuse_other_layout(version: int, saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise InputError if the optimizer state of one layout cannot be loaded into another.

    Args:
        version: The policy version of the checkpoint, for the error message.
        saved: The layout of the checkpoint.
        here: The layout of this attempt.

    Raises:
        InputError: Settings that must be the same differ; the message names each of them.
        CorruptObjectError: The layout of the checkpoint is incomplete.
    """
    fixed = _FIXED if here["distributed_optimizer"] else _FIXED | _EXPERT
    if absent := sorted(fixed.keys() - saved.keys()):
        raise CorruptObjectError(
            f"{keys.checkpoint(version)}: found a layout without {', '.join(absent)}, expected "
            f"{', '.join(sorted(fixed))}; {REMOVE}"
        )
    problems = [
        f"checkpoint of policy {version} was saved with "
        f"actor_rollout_ref.actor.megatron.{key} {saved[name]}, but this attempt has {here[name]}: "
        "the checkpoint's optimizer state cannot be converted; restore the setting, or start a new "
        "run (another trainer.experiment_name) from this policy, which loads only the weights"
        for name, key in fixed.items()
        if saved[name] != here[name]
    ]
    if problems:
        raise InputError(problems)
