"""Rules for PPO's critic: its settings require a critic and must fit the actor's."""

from collections.abc import Callable, Iterable, Iterator

from pipeline.config.actor import Actor
from pipeline.config.critic import Critic, over_actor
from pipeline.config.keys import setting_keys, value_at
from pipeline.config.rules.losses import NORM
from pipeline.config.rules.precision import option_problems
from pipeline.config.rules.rates import OPTIM, decay_problems, rate_notes, rate_problems
from pipeline.config.tree import RunConfig

_OPTIM = "critic.optim"
_MINI = "critic.ppo_mini_batch_size"
_CUTS = ("megatron.", "ppo_micro_", "use_dynamic_bsz", "ppo_max_token_", "forward_")
"""Prefixes of the names of settings that affect only the rounding of a result."""


def critic_problems(config: RunConfig) -> Iterator[str]:
    """Yield problems with the critic's settings.

    Without a critic, its settings must not be set. With one, they must not contradict other
    settings.
    """
    if not config.has_critic:
        yield from _without_critic(config)
        return
    critic, batch = config.critic, config.data.train_batch_size
    if critic.ppo_mini_batch_size is not None and batch % critic.ppo_mini_batch_size:
        yield (
            f"{_MINI}: found {critic.ppo_mini_batch_size}, expected a divisor of "
            f"data.train_batch_size={batch} (both count prompts); leave it out to use the actor's"
        )
    if critic.replay_routes and config.actor_rollout_ref.actor.router_replay.mode == "disabled":
        yield (
            "critic.replay_routes: found True, but actor_rollout_ref.actor.router_replay.mode is "
            "disabled, so no routes exist; write mode=R2 or mode=R3, or replay_routes=false"
        )
    mode = critic.loss_agg_mode or config.actor_rollout_ref.actor.loss_agg_mode
    if critic.loss_scale_factor is not None and mode != NORM:
        yield (
            f"critic.loss_scale_factor: found {critic.loss_scale_factor}, but only {NORM} divides "
            f"by it, and critic.loss_agg_mode (null: the actor's) is {mode}; "
            f"write null, or loss_agg_mode={NORM}"
        )
    yield from _renamed(rate_problems(critic.optim))
    yield from of_critic(config, option_problems)


def of_critic(config: RunConfig, rule: Callable[[Actor], Iterable[str]]) -> Iterator[str]:
    """Yield the problems that a rule for the actor finds with the critic, if the run has one.

    Args:
        config: The settings.
        rule: Returns problems with settings of the actor. What it also finds with the actor itself
            is left out.
    """
    actor = config.actor_rollout_ref.actor
    if config.has_critic:
        known = {*rule(actor)}
        settings = over_actor(config.critic, actor)
        yield from _renamed(text for text in rule(settings) if text not in known)


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """Yield problems with an actor or critic schedule that does not fit into lr_decay_steps."""
    yield from decay_problems(config.actor_rollout_ref.actor.optim)
    if config.has_critic:
        yield from _renamed(decay_problems(config.critic.optim))


def critic_notes(config: RunConfig) -> Iterator[str]:
    """Yield notes on the critic's settings.

    The notes cover the critic's learning rates, runs that train only the critic, and runs without a
    critic.
    """
    if not config.has_critic:
        for key, value in _written(config, cuts=True):
            yield (
                f"{key}: {value} has no effect, because algorithm.adv_estimator="
                f"{config.algorithm.adv_estimator} uses no critic"
            )
        return
    steps, warmup = config.trainer.total_training_steps, config.trainer.critic_warmup
    yield from _renamed(rate_notes(config.critic.optim, steps))
    if warmup >= steps:
        yield (
            f"trainer.critic_warmup: {warmup} steps of warm-up cover all {steps} steps of the run, "
            "so only the critic is trained"
        )


def _renamed(texts: Iterator[str]) -> Iterator[str]:
    """Replace the actor's optimizer settings with the critic's in texts from the actor's rules."""
    return (text.replace(OPTIM, _OPTIM) for text in texts)


def _without_critic(config: RunConfig) -> Iterator[str]:
    if found := _written(config, cuts=False):
        key, value = found[0]
        more = f" and {len(found) - 1} more such settings" if len(found) > 1 else ""
        yield (
            f"{key}: found {value}{more}, but algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator} uses no critic; write algorithm.adv_estimator=gae, "
            "or leave the critic's settings out"
        )


def _written(config: RunConfig, cuts: bool) -> list[tuple[str, object]]:
    """Return the critic's settings that differ from its defaults and from the actor's values.

    Other values are left out, because files that contain every setting repeat them. If `cuts` is
    true, only settings for memory and micro-batches are returned; otherwise, only the remaining
    settings.
    """
    actor = config.actor_rollout_ref.actor
    ours, plain = over_actor(config.critic, actor), over_actor(Critic(), actor)
    found: list[tuple[str, object]] = []
    for key in setting_keys():
        group, _, name = key.name.partition(".")
        if group != "critic" or name.startswith(_CUTS) is not cuts:
            continue
        shared = name.partition(".")[0] in type(actor).model_fields
        before, now = (plain, ours) if shared else (Critic(), config.critic)
        if value_at(now, name) != value_at(before, name):
            found.append((key.name, value_at(now, name)))
    warmup = config.trainer.critic_warmup
    return [*found, ("trainer.critic_warmup", warmup)] if warmup and not cuts else found
