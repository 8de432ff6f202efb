"""A run's identity: model, data, algorithm, sampling, replay, seed, parallel layout."""

from typing import Any

from pipeline.config.keys import setting_keys, value_at
from pipeline.config.tree import RunConfig


def identity(config: RunConfig) -> dict[str, Any]:
    """The settings that may not change when a run is attached again, by dotted key.

    Left out: operational settings, the store's place (a run may be copied), and the paths of
    inputs, whose content is compared by digest when they are staged.
    """
    return {
        key.name: value_at(config, key.name)
        for key in setting_keys()
        if not (key.operational or key.names_input or key.name.startswith("store."))
    }


def differing(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Old and new value of every identity setting in which two configs differ."""
    before, after = identity(old), identity(new)
    return {key: (before[key], after[key]) for key in after if before[key] != after[key]}


_OF_INPUTS = {"reward": ("custom_reward_function.", "reward."), "prompts": ("data.",)}


def input_of(key: str) -> str | None:
    """The input of a run, as StagedInputs names it, that an identity setting belongs to.

    Such a setting may be amended as long as the input may. None: the setting may not be amended.
    """
    for name, prefixes in _OF_INPUTS.items():
        if key.startswith(prefixes):
            return name
    return None
