"""How the micro-batches of each pass are cut: by samples, or by tokens.

The log-prob passes hold no gradients, so they may take larger ones than the updates; what their own
settings leave open is the actor's, as in verl.
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
    """The limits of a pass's micro-batches; of the two one is None.

    Example: Budget(None, 16384, 'actor_rollout_ref.actor.ppo_max_token_len_per_gpu', ...).
    """

    samples: int | None
    tokens: int | None
    """Of all ranks that hold a part of the same sequences."""
    tokens_key: str
    """The setting that the tokens are from."""
    dynamic_key: str
    """The setting that chooses between samples and tokens."""


def passes_of(config: RunConfig) -> tuple[Pass, ...]:
    """The passes of a step; the reference's and the critic's only with one."""
    reference: tuple[Pass, ...] = ("reference",)
    return (
        *("update", "log_prob"),
        *(reference if config.has_reference else ()),
        *(OF_CRITIC if config.has_critic else ()),
    )


def budget(config: RunConfig, of: Pass) -> Budget:
    """The limits of a pass."""
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
    tokens *= actor.megatron.context_parallel_size  # the setting is for a GPU, as in verl
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
    """Token budgets without packing, and those that the longest sample exceeds; each key once."""
    limits = [budget(config, one) for one in passes_of(config)]
    return list(dict.fromkeys(text for one in limits for text in _problems(config, one)))


def budget_notes(config: RunConfig) -> Iterator[str]:
    """Yield a note on each token budget of a pass that is cut by samples."""
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
                f"{key}: it has no effect on micro-batches that are cut by samples; "
                f"{_ACTOR}.use_dynamic_bsz=true cuts by tokens"
            )


def _problems(config: RunConfig, limits: Budget) -> Iterator[str]:
    if limits.tokens is None:
        return
    if not config.actor_rollout_ref.actor.megatron.use_remove_padding:
        yield (
            f"{limits.dynamic_key}: found true with {_ACTOR}.megatron.use_remove_padding=false, "
            "expected packed micro-batches; write use_remove_padding=true, or "
            f"{limits.dynamic_key.rpartition('.')[2]}=false"
        )
        return
    longest = config.data.max_prompt_length + config.data.max_response_length
    if limits.tokens < longest:
        ranks = config.actor_rollout_ref.actor.megatron.context_parallel_size
        least = -(-longest // ranks)
        over = f" over {_ACTOR}.megatron.context_parallel_size={ranks}" if ranks > 1 else ""
        yield (
            f"{limits.tokens_key}: found {limits.tokens // ranks}, expected at least {least}, the "
            "tokens of the longest sample (data.max_prompt_length + data.max_response_length)"
            f"{over}; write {least} or more"
        )
