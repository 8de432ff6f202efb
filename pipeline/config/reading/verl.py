"""The treatment of verl's settings that Retrace does not have.

Users can therefore keep the settings files that they wrote for verl. A setting is refused, with the
reason, if the run would not compute what the setting asks for. If another setting determines its
value here, the two must agree. A setting without a counterpart is not taken over, which a note
reports.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from math import isclose
from typing import Any

from pipeline.config.keys import value_at
from pipeline.config.reading.verl_keys import NOT_TAKEN_OVER, REFUSED
from pipeline.config.tree import RunConfig

UNUSED = "not taken over; Retrace has no such setting"
"""The note on settings without a counterpart."""
_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_Agrees = Callable[[RunConfig, str, Any], bool]
"""Returns whether a value agrees with the settings; called with them, the key and the value."""


@dataclass(frozen=True)
class Foreign:
    """One pattern of verl settings that Retrace does not have."""

    pattern: str
    """Dotted key; `*` matches any characters."""
    reason: str = ""
    """Why other values are refused; empty if any value is ignored."""
    harmless: tuple[Any, ...] = ()
    """The values that match what Retrace always does."""
    agrees: _Agrees | None = None
    """For a setting that another setting determines here: whether the two agree."""
    fix: str = ""
    """The fix for a value that does not agree."""

    @property
    def ignored(self) -> bool:
        """Whether the setting is ignored regardless of its value."""
        return not self.reason

    @property
    def note(self) -> str:
        """The note on an accepted value."""
        return UNUSED if self.ignored else f"ignored; {self.reason}"

    def accepts(self, key: str, value: Any, config: RunConfig | None = None) -> bool:
        """Return whether a value may be ignored.

        Null and an empty group always may, because they have no effect in verl either.

        Args:
            key: The dotted key of verl's setting.
            value: The setting's value.
            config: All settings of the run; with None, a value that must agree with one of them
                counts as accepted.
        """
        if self.ignored or value is None or value == {}:
            return True
        if self.agrees is not None:
            return config is None or self.agrees(config, key, value)
        # In Python True == 1, but in a settings file they differ.
        return any(
            value == h and isinstance(value, bool) == isinstance(h, bool) for h in self.harmless
        )

    @property
    def refusal(self) -> str:
        """The reason for a refusal, and the fix."""
        fix = f"write {self.values} or leave the key out" if self.values else "leave the key out"
        return f"{self.reason}; {self.fix or fix}"

    @property
    def values(self) -> str:
        """The harmless values, as text."""
        return " or ".join(map(str, self.harmless))


@cache
def foreign_settings() -> tuple[Foreign, ...]:
    """Return all entries; the first one that matches a key applies."""
    return tuple(_entries())


def _entries() -> Iterator[Foreign]:
    for names, reason, agrees, fix in _MAPPED:
        for name in names.split():
            yield Foreign(name, reason, agrees=agrees, fix=fix)
    for group, rows in REFUSED.items():
        for names, reason, *harmless in rows:
            for name in names.split():
                yield Foreign(f"{group}.{name}".lstrip("."), reason, tuple(harmless))
    for group, names in NOT_TAKEN_OVER.items():
        for name in names.split():
            yield Foreign(f"{group}.{name}".lstrip("."))


def find_foreign(key: str) -> Foreign | None:
    """Return the entry for one of verl's keys, or None if the key is unknown."""
    return next((entry for entry in foreign_settings() if _matches(key, entry.pattern)), None)


def _matches(key: str, pattern: str) -> bool:
    # "critic.*" also matches an empty or null "critic".
    return fnmatchcase(key, pattern) or pattern == f"{key}.*"


def _equal(names: str, *keys: str) -> tuple[str, str, _Agrees, str]:
    """Return the row for settings that must equal the sum of other settings."""
    named = " + ".join(keys)
    return (
        names,
        f"{named.removeprefix('actor_rollout_ref.')} determines this value",
        lambda config, _, value: bool(value == sum(value_at(config, key) for key in keys)),
        f"change {named}, or leave the key out",
    )


def _long_enough(config: RunConfig, _: str, length: int) -> bool:
    return length >= config.data.max_prompt_length + config.data.max_response_length


def _least_rate(config: RunConfig, key: str, ratio: Any) -> bool:
    """Return whether min_lr is verl's ratio times lr.

    If the user did not set min_lr, `plain_values` has already computed it from the ratio.
    """
    optim = value_at(config, key.rpartition(".")[0])
    return isinstance(ratio, int | float) and isclose(optim.min_lr, ratio * optim.lr)


def _of_actor(config: RunConfig, key: str, value: Any) -> bool:
    """Return whether the value equals the actor's, if the run has this reference or critic."""
    exists = config.has_reference if key.startswith(_REF) else config.has_critic
    name = key.removeprefix(f"{_REF}.").removeprefix("critic.")
    group, _, field = name.rpartition(".")
    actor = config.actor_rollout_ref.actor
    if group == "megatron.override_transformer_config":
        of_actor = actor.megatron.override_transformer_config.get(field)
        return not exists or value == of_actor or (key.startswith(_REF) and field in _BY_ROUNDING)
    return not exists or value == value_at(actor, name)


_BY_ROUNDING = (
    *("recompute_granularity", "recompute_method", "recompute_modules", "recompute_num_layers"),
    *("gradient_accumulation_fusion", "sequence_parallel", "attention_backend", "use_flash_attn"),
)
"""Fields of TransformerConfig that change the results of a forward pass only by rounding."""
_LAYOUT = "the critic has the same layout and ranks as the actor and is computed in the same way"

_MAPPED: tuple[tuple[str, str, _Agrees, str], ...] = (
    _equal(f"{_ACTOR}.rollout_n {_REF}.rollout_n", f"{_ROLLOUT}.n"),
    _equal(f"{_ROLLOUT}.prompt_length", "data.max_prompt_length"),
    _equal(f"{_ROLLOUT}.response_length", "data.max_response_length"),
    _equal("reward.reward_kwargs.max_resp_len", "data.max_response_length"),
    (
        f"{_ROLLOUT}.max_model_len {_ROLLOUT}.engine_kwargs.vllm.max_model_len "
        f"{_MODEL}.override_config.max_position_embeddings "
        f"{_MODEL}.override_config.model_config.max_position_embeddings",
        "samples never exceed the limits in data, and a smaller value would cut responses short",
        _long_enough,
        "write at least data.max_prompt_length + data.max_response_length, or null",
    ),
    (
        f"{_ROLLOUT}.calculate_log_probs",
        "the engine's log-probs are always recorded, and rollout_correction uses them",
        lambda config, _, value: value or not config.algorithm.rollout_correction.corrects,
        "write True, or no correction in algorithm.rollout_correction",
    ),
    (
        f"{_ROLLOUT}.val_kwargs.do_sample",
        "val_kwargs.temperature determines this value; 0 means greedy",
        lambda config, _, value: (
            value or config.actor_rollout_ref.rollout.val_kwargs.temperature == 0
        ),
        f"write {_ROLLOUT}.val_kwargs.temperature=0 for greedy, or do_sample=True",
    ),
    (
        f"{_ACTOR}.optim.min_lr_ratio critic.optim.min_lr_ratio",
        "min_lr is the ratio times lr",
        _least_rate,
        "leave one of min_lr and min_lr_ratio out",
    ),
    (
        " ".join(
            f"{optim}.{name}"
            for optim in (f"{_ACTOR}.optim", "critic.optim")
            for name in ("lr_scheduler_type", "warmup_style")
        ),
        "this setting is called lr_decay_style here",
        lambda config, key, value: bool(
            value == value_at(config, f"{key.rpartition('.')[0]}.lr_decay_style")
        ),
        "write it as lr_decay_style in the same group, or leave it out",
    ),
    (
        f"{_REF}.megatron.use_dist_checkpointing",
        "the reference is policy 0",
        lambda config, _, value: value is False or not config.has_reference,
        "write False or leave the key out",
    ),
    (
        f"{_REF}.megatron.dtype {_REF}.megatron.override_transformer_config.*",
        "the reference is computed like the actor",
        _of_actor,
        f"write the same in {_ACTOR}.megatron, or leave the key out",
    ),
    (
        "critic.enable",
        "only algorithm.adv_estimator=gae uses a critic",
        lambda config, _, value: value is config.has_critic,
        "change algorithm.adv_estimator, or leave the key out",
    ),
    (
        "critic.rollout_n",
        "rollout.n determines this value",
        lambda config, _, value: (
            not config.has_critic or value == config.actor_rollout_ref.rollout.n
        ),
        "leave the key out",
    ),
    (
        "critic.model.path",
        "the critic starts from the actor's weights, with a new value head",
        lambda config, _, value: (
            not config.has_critic or value == config.actor_rollout_ref.model.path
        ),
        f"write {_MODEL}.path, or leave the key out",
    ),
    (
        "critic.megatron.*_parallel_size critic.megatron.sequence_parallel "
        "critic.megatron.use_distributed_optimizer critic.megatron.use_remove_padding "
        "critic.megatron.dtype critic.megatron.override_transformer_config.*",
        _LAYOUT,
        _of_actor,
        f"use the value from {_ACTOR}.megatron, or leave the key out",
    ),
)
