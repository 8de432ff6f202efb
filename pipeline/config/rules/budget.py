"""The limits of each pass's micro-batches: a number of samples or a number of tokens.

Log-prob passes keep no gradients, so their micro-batches may be larger than those of the updates.
As in verl, the actor's settings apply to a pass that does not have separate settings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from pipeline.config.tree import RunConfig

Pass = Literal["update", "log_prob", "reference", "critic_update", "values"]
OF_CRITIC: tuple[Pass, ...] = ("critic_update", "values")
_ACTOR = "actor_rollout_ref.actor"
_OWN = {"log_prob": "actor_rollout_ref.rollout", "reference": "actor_rollout_ref.ref"}


@dataclass(frozen=True)
class Budget:
    """The limits of a pass's micro-batches: a number of either samples or tokens.

    Example: Budget(None, 16384, 'actor_rollout_ref.actor.ppo_max_token_len_per_gpu', ...).
    """

    samples: int | None
    """The limit in samples, or None."""
    tokens: int | None
    """The limit in tokens, or None. It is the total for all ranks that share sequences."""
    tokens_key: str
    """The setting that limits the tokens."""
    dynamic_key: str
    """The setting that selects samples or tokens."""


def passes_of(config: RunConfig) -> tuple[Pass, ...]:
    """Return the passes of a step, including those of any reference and critic."""
    reference: tuple[Pass, ...] = ("reference",)
    return (
        *("update", "log_prob"),
        *(reference if config.has_reference else ()),
        *(OF_CRITIC if config.has_critic else ()),
    )


def budget(config: RunConfig, of: Pass) -> Budget:
    """Return the limits of a pass."""
    policy = config.actor_rollout_ref
    actor, critic = (_ACTOR, policy.actor, "ppo"), ("critic", config.critic, "ppo")
    groups: dict[Pass, list[tuple[str, BaseModel, str]]] = {
        "update": [actor],
        "log_prob": [(_OWN["log_prob"], policy.rollout, "log_prob"), actor],
        "reference": [(_OWN["reference"], policy.ref, "log_prob"), actor],
        "critic_update": [critic, actor],
        "values": [("critic", config.critic, "forward"), critic, actor],
    }

    def first(name: str) -> tuple[str, Any]:
        """Return the key and value of the first group's setting that is not null."""
        for key, group, prefix in groups[of]:
            for full in (f"{prefix}_{name}", name):
                if (value := getattr(group, full, None)) is not None:
                    return f"{key}.{full}", value
        raise AssertionError(name)  # the actor's settings are never null

    dynamic_key, dynamic = first("use_dynamic_bsz")
    tokens_key, tokens = first("max_token_len_per_gpu")
    if not dynamic:
        return Budget(first("micro_batch_size_per_gpu")[1], None, tokens_key, dynamic_key)
    # As in verl, the setting is for one GPU.
    ranks = policy.actor.megatron.context_parallel_size
    return Budget(None, tokens * ranks, tokens_key, dynamic_key)


def budget_problems(config: RunConfig) -> list[str]:
    """Return problems with token budgets that are used without packing or are too small.

    A budget must be large enough for the longest sample. Each setting is reported only once.
    """
    limits = [budget(config, one) for one in passes_of(config)]
    return list(dict.fromkeys(text for one in limits for text in _problems(config, one)))


def _problems(config: RunConfig, limits: Budget) -> Iterator[str]:
    if limits.tokens is None:
        return
    if not config.actor_rollout_ref.actor.megatron.use_remove_padding:
        yield (
            f"{limits.dynamic_key}: found True with {_ACTOR}.megatron.use_remove_padding=false, "
            "expected packed micro-batches; write use_remove_padding=true, or "
            f"{limits.dynamic_key.rpartition('.')[2]}=false"
        )
        return
    longest = config.data.max_prompt_length + config.data.max_response_length
    if limits.tokens < longest:
        ranks = config.actor_rollout_ref.actor.megatron.context_parallel_size
        least = -(-longest // ranks)
        over = f" divided by {_ACTOR}.megatron.context_parallel_size={ranks}" if ranks > 1 else ""
        yield (
            f"{limits.tokens_key}: found {limits.tokens // ranks}, expected at least {least}, the "
            "length of the longest sample (data.max_prompt_length + data.max_response_length)"
            f"{over}; write {least} or more"
        )
