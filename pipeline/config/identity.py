"""A run's identity: model, data, algorithm, sampling, replay, seed and parallel layout."""

from typing import Any

from pipeline.config.keys import setting_keys, value_at
from pipeline.config.tree import RunConfig
from pipeline.rl.custom import CUSTOM, custom_function


def identity(config: RunConfig) -> dict[str, Any]:
    """Return the settings that may not change when a run is attached again, by dotted key.

    Operational settings, the store's settings (because a run may be copied) and the paths of inputs
    are not included. In place of the paths, the digests of the inputs are compared when the inputs
    are staged. This also applies to files with user-defined estimators and losses, so `differing`
    compares only the function's name.
    """
    return {
        key.name: value_at(config, key.name)
        for key in setting_keys()
        if not (key.operational or key.names_input or key.name.startswith("store."))
    }


def differing(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the old and new value of every identity setting in which two configs differ."""
    before, after = identity(old), identity(new)
    return {
        key: (before[key], after[key])
        for key in after
        if _compared(key, before[key]) != _compared(key, after[key])
    }


def _compared(key: str, value: Any) -> Any:
    """Return the part of a value to compare; for a user's function, its name without the path."""
    function = custom_function(value) if key in CUSTOM else None
    return value if function is None else (function.name,)


_OF_INPUTS = {"reward": ("custom_reward_function.", "reward."), "prompts": ("data.",)}
LAYOUT = "layout"
"""The name that `input_of` returns for settings of the parallel layout. They determine how training
is split over ranks, into micro-batches, and between GPU and host."""
_MEGATRON = "actor_rollout_ref.actor.megatron"
_OF_LAYOUT = {
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    f"{_MEGATRON}.tensor_model_parallel_size",
    f"{_MEGATRON}.pipeline_model_parallel_size",
    f"{_MEGATRON}.virtual_pipeline_model_parallel_size",
    f"{_MEGATRON}.context_parallel_size",
    f"{_MEGATRON}.expert_model_parallel_size",
    f"{_MEGATRON}.expert_tensor_parallel_size",
    f"{_MEGATRON}.sequence_parallel",
}
_OF_LAYOUT_ENDS = ("_per_gpu", "use_dynamic_bsz", "_offload")
_FIELDS = f"{_MEGATRON}.override_transformer_config"
_LAYOUT_FIELDS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "recompute_",
)
"""Prefixes of the TransformerConfig fields that change neither weights nor results."""


def input_of(key: str, was: Any, now: Any) -> str | None:
    """Return the name (as in StagedInputs) of the input to which an identity setting belongs.

    Such a setting may change as long as the input may be staged again.

    Args:
        key: The dotted key of the setting.
        was: The run's value.
        now: The new value.

    Returns:
        The input's name; LAYOUT for a setting of the parallel layout, which may change at any
        start; None for a setting that may not change.
    """
    for name, prefixes in _OF_INPUTS.items():
        if key.startswith(prefixes):
            return name
    if key in _OF_LAYOUT or key.endswith(_OF_LAYOUT_ENDS):
        return LAYOUT
    if key == _FIELDS and _without_layout(was) == _without_layout(now):
        return LAYOUT
    return None


def _without_layout(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not name.startswith(_LAYOUT_FIELDS)}
