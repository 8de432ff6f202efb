"""The limits of each pass's micro-batches: a number of samples or a number of tokens.

Log-prob passes keep no gradients, so their micro-batches may be larger than those of the updates.
As in verl, the actor's settings apply to a pass that does not have separate settings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pipeline.config.critic import over_actor
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
    if of in OF_CRITIC:
        return _of_critic(config, of)
    actor = config.actor_rollout_ref.actor
    samples, tokens = actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu
    dynamic = actor.use_dynamic_bsz
    tokens_key, dynamic_key = f"{_ACTOR}.ppo_max_token_len_per_gpu", f"{_ACTOR}.use_dynamic_bsz"
    if of != "update":
        ref, rollout = config.actor_rollout_ref.ref, config.actor_rollout_ref.rollout
        own = ref if of == "reference" else rollout
        if own.log_prob_micro_batch_size_per_gpu is not None:
            samples = own.log_prob_micro_batch_size_per_gpu
        if own.log_prob_max_token_len_per_gpu is not None:
            tokens = own.log_prob_max_token_len_per_gpu
            tokens_key = f"{_OWN[of]}.log_prob_max_token_len_per_gpu"
        if own.log_prob_use_dynamic_bsz is not None:
            dynamic = own.log_prob_use_dynamic_bsz
            dynamic_key = f"{_OWN[of]}.log_prob_use_dynamic_bsz"
    tokens *= actor.megatron.context_parallel_size  # as in verl, the setting is for one GPU
    return Budget(
        None if dynamic else samples, tokens if dynamic else None, tokens_key, dynamic_key
    )


def _of_critic(config: RunConfig, of: Pass) -> Budget:
    critic = config.critic
    settings = over_actor(critic, config.actor_rollout_ref.actor)
    samples, tokens = settings.ppo_micro_batch_size_per_gpu, settings.ppo_max_token_len_per_gpu
    tokens_key = "critic.ppo_max_token_len_per_gpu"
    if of == "values":
        samples = critic.forward_micro_batch_size_per_gpu or samples
        if critic.forward_max_token_len_per_gpu is not None:
            tokens = critic.forward_max_token_len_per_gpu
            tokens_key = "critic.forward_max_token_len_per_gpu"
    tokens *= settings.megatron.context_parallel_size
    dynamic = settings.use_dynamic_bsz
    inherited = critic.use_dynamic_bsz is None
    dynamic_key = f"{_ACTOR}.use_dynamic_bsz" if inherited else "critic.use_dynamic_bsz"
    return Budget(
        None if dynamic else samples, tokens if dynamic else None, tokens_key, dynamic_key
    )


def budget_problems(config: RunConfig) -> list[str]:
    """Return problems with token budgets that are used without packing or are too small.

    A budget must be large enough for the longest sample. Each setting is reported only once.
    """
    limits = [budget(config, one) for one in passes_of(config)]
    return list(dict.fromkeys(text for one in limits for text in _problems(config, one)))


def budget_notes(config: RunConfig) -> Iterator[str]:
    """Yield a note on each token budget that is set for micro-batches split by sample count."""
    limits = [budget(config, one) for one in passes_of(config)]
    used = {one.tokens_key for one in limits if one.tokens is not None}
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    default = type(actor).model_fields["ppo_max_token_len_per_gpu"].default
    written = {
        f"{_ACTOR}.ppo_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu != default,
        f"{_OWN['log_prob']}.log_prob_max_token_len_per_gpu": rollout.log_prob_max_token_len_per_gpu
        is not None,
    }
    for key, is_written in written.items():
        if is_written and key not in used:
            yield (
                f"{key}: this setting has no effect, because micro-batches are formed by number of "
                f"samples; write {_ACTOR}.use_dynamic_bsz=true to form them by token count"
            )


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
