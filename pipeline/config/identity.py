"""A run's identity: model, data, algorithm, sampling, replay, seed, parallel layout."""

from typing import Any

from pipeline.config.keys import setting_keys, value_at
from pipeline.config.tree import RunConfig
from pipeline.rl.custom import CUSTOM, custom_function


def identity(config: RunConfig) -> dict[str, Any]:
    """The settings that may not change when a run is attached again, by dotted key.

    Left out: operational settings, the store's place (a run may be copied), and the paths of
    inputs, whose content is compared by digest when they are staged. So is that of files with
    users' estimators and losses: `differing` compares only the function's name.
    """
    return {
        key.name: value_at(config, key.name)
        for key in setting_keys()
        if not (key.operational or key.names_input or key.name.startswith("store."))
    }


def differing(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Old and new value of every identity setting in which two configs differ."""
    before, after = identity(old), identity(new)
    return {
        key: (before[key], after[key])
        for key in after
        if _compared(key, before[key]) != _compared(key, after[key])
    }


def _compared(key: str, value: Any) -> Any:
    """The part of a value that is compared: of a user's function its name, not its file's path."""
    function = custom_function(value) if key in CUSTOM else None
    return value if function is None else (function.name,)


_OF_INPUTS = {"reward": ("custom_reward_function.", "reward."), "prompts": ("data.",)}


def input_of(key: str) -> str | None:
    """The input of a run, as StagedInputs names it, that an identity setting belongs to.

    Such a setting may be amended as long as the input may. None: the setting may not be amended.
    """
    for name, prefixes in _OF_INPUTS.items():
        if key.startswith(prefixes):
            return name
    return None
