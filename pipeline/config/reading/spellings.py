"""verl's alternative ways to write our settings: second names, and values that mean a default.

A setting must not have different values under its two names. Null and the default are exceptions,
because verl's own files contain the defaults of all settings.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticUndefined

from pipeline.config.dotted import ABSENT, get, leaves, put, take
from pipeline.config.keys import all_keys
from pipeline.config.reading.verl_keys import ALIASES
from pipeline.errors import InputError

_OPTIMS = ("actor_rollout_ref.actor.optim", "critic.optim")
_MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
_DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz"

_KL = ("actor_rollout_ref.actor.kl_loss_type", "algorithm.kl_penalty")
_KL_NAMES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
"""Our name of each estimator of the KL, keyed by verl's other name."""

_UNSET = {
    "trainer.total_training_steps": "",
    **{
        f"{optim}.{name}": ""
        for optim in _OPTIMS
        for name in ("lr_warmup_steps", "lr_warmup_steps_ratio")
    },
    "custom_reward_function.name": "",
    "custom_reward_function.reward_kwargs": "",
    "data.apply_chat_template_kwargs": "",
    "data.seed": "data.seed: null means the default here",
}
"""Settings for which null means "not set" in verl, each with a note (may be empty)."""


def our_spelling(key: str) -> str:
    """Return our spelling of a dotted key, which may contain verl's spelling of a group."""
    for other, ours in ALIASES.items():
        if f"{key}.".startswith(f"{other}."):
            return ours + key.removeprefix(other)
    return key


def one_spelling(settings: dict[str, Any], problems: list[str]) -> dict[str, str]:
    """Move settings from verl's spellings to ours; return the user's spellings, keyed by ours."""
    written: dict[str, str] = {}
    for other, ours in ALIASES.items():
        group = take(settings, other)
        if group is None:
            continue
        if not isinstance(group, dict):
            problems.append(f"{other}: found {group!r}, expected a group of settings")
            continue
        for name, value in leaves(group):
            key, there = f"{ours}.{name}", get(settings, f"{ours}.{name}")
            if name.endswith("_target_") or (there is not ABSENT and _says_nothing(key, value)):
                continue
            if there is ABSENT or there == value or _says_nothing(key, there):
                written[key] = f"{other}.{name}"
                try:
                    put(settings, key.split("."), value)
                except InputError as error:
                    problems += error.problems
            else:
                problems.append(
                    f"{other}.{name}: found {value!r}, but {key}, another spelling of the same "
                    f"setting, is {there!r}; keep {key} and remove the other"
                )
    return written


def _says_nothing(key: str, value: Any) -> bool:
    """Return whether a value is null or the default, as in files that contain every setting."""
    known = all_keys().get(key)
    if value is None or known is None or known.section is not None:
        return value is None
    default = known.field.default
    return default is not PydanticUndefined and bool(value == default)


def plain_values(settings: dict[str, Any]) -> list[str]:
    """Remove values that mean "not set" in verl, and convert some others; return notes on both."""
    notes = [
        note
        for key, note in _UNSET.items()
        if get(settings, key) is None and take(settings, key) is None and note
    ]
    for warmup in (f"{optim}.lr_warmup_steps" for optim in _OPTIMS):
        steps = get(settings, warmup)
        if type(steps) is int and steps == -1:  # verl then uses the ratio, whose default is 0
            take(settings, warmup)
    every = get(settings, "trainer.save_freq")
    if _is_below(every, 1):
        take(settings, "trainer.save_freq")
        default = all_keys()["trainer.save_freq"].field.default
        notes.append(
            f"trainer.save_freq: {every} means every {default} steps here, because a restart needs "
            "checkpoints; only the newest checkpoints are kept"
        )
    for key, least in least_rate(dict(leaves(settings))).items():
        put(settings, key.split("."), least)
    if get(settings, _MICRO) is None and get(settings, _DYNAMIC) is True:
        take(settings, _MICRO)
    for key in _KL:
        if isinstance(name := get(settings, key), str):
            put(settings, key.split("."), _KL_NAMES.get(name.lower(), name))
    return notes + _loggers(settings)


def least_rate(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return each optim.min_lr that verl's min_lr_ratio implies: the ratio times optim.lr.

    FSDP's cosine schedule falls to this rate, as Megatron's does. If min_lr is also set, its value
    is kept and must agree with the ratio. `settings` and the result are keyed by dotted key.
    """
    found = {}
    for optim in _OPTIMS:
        ratio, least = settings.get(f"{optim}.min_lr_ratio"), settings.get(f"{optim}.min_lr")
        rate = settings.get(f"{optim}.lr", all_keys()[f"{optim}.lr"].field.default)
        if ratio and not least and _is_number(ratio) and _is_number(rate):
            found[f"{optim}.min_lr"] = ratio * rate
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_ELSEWHERE = ("vemlp_wandb", "clearml", "rl_insight")
"""verl's loggers that are not implemented yet."""


def _loggers(settings: dict[str, Any]) -> list[str]:
    key = "trainer.logger"
    found = get(settings, key)
    names = [found] if isinstance(found, str) else found
    if not isinstance(names, list):
        return []
    missing = [name for name in names if name in _ELSEWHERE]
    rest = [name for name in names if name not in _ELSEWHERE]
    if isinstance(found, str) or missing:
        put(settings, key.split("."), rest or ["console"])
    if not missing:
        return []
    return [
        f"{key}: found {', '.join(missing)}, which is not supported yet; metrics are written to "
        f"{', '.join(map(str, rest)) or 'console'}, and the store contains all of them"
    ]


def _is_below(value: Any, bound: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value < bound
