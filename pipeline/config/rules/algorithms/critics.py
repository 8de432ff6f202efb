"""Rules of PPO's critic: its settings need it, and must fit the actor's."""

from collections.abc import Iterator

from pipeline.config.critic import Critic, over_actor
from pipeline.config.keys import setting_keys, value_at
from pipeline.config.rules.cuda import cuda_problems
from pipeline.config.rules.losses import NORM
from pipeline.config.rules.megatron_options import option_problems
from pipeline.config.rules.rates import OPTIM, decay_problems, rate_notes, rate_problems
from pipeline.config.tree import RunConfig

_OPTIM = "critic.optim"
_MINI = "critic.ppo_mini_batch_size"
_CUTS = ("megatron.", "ppo_micro_", "use_dynamic_bsz", "ppo_max_token_", "forward_")
"""Beginnings of the names of settings that change no result but its rounding."""


def critic_problems(config: RunConfig) -> Iterator[str]:
    """Yield settings of a critic that the run does not have, and those that contradict others."""
    if not config.has_critic:
        yield from _without_critic(config)
        return
    critic, batch = config.critic, config.data.train_batch_size
    if critic.ppo_mini_batch_size is not None and batch % critic.ppo_mini_batch_size:
        yield (
            f"{_MINI}: found {critic.ppo_mini_batch_size}, expected a divisor of "
            f"data.train_batch_size={batch} (both count prompts); leave it out for the actor's"
        )
    if critic.replay_routes and config.actor_rollout_ref.actor.router_replay.mode == "disabled":
        yield (
            "critic.replay_routes: found true, but actor_rollout_ref.actor.router_replay.mode is "
            "disabled, so there are no routes; write mode=R2 or mode=R3, or replay_routes=false"
        )
    settings = over_actor(critic, config.actor_rollout_ref.actor)
    if critic.loss_scale_factor is not None and settings.loss_agg_mode != NORM:
        yield (
            f"critic.loss_scale_factor: found {critic.loss_scale_factor}, but only {NORM} divides "
            f"by it, and critic.loss_agg_mode (null: the actor's) is {settings.loss_agg_mode}; "
            "write null, or that mode"
        )
    yield from _renamed(rate_problems(critic.optim))
    of_actor = {*option_problems(config.actor_rollout_ref.actor)}
    yield from _renamed(text for text in option_problems(settings) if text not in of_actor)
    if config.trainer.device == "cpu":
        of_actor = {*cuda_problems(config.actor_rollout_ref.actor)}
        yield from _renamed(text for text in cuda_problems(settings) if text not in of_actor)


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """Yield parts of a schedule, the actor's or the critic's, that do not fit into its steps."""
    yield from decay_problems(config.actor_rollout_ref.actor.optim)
    if config.has_critic:
        yield from _renamed(decay_problems(config.critic.optim))


def critic_notes(config: RunConfig) -> Iterator[str]:
    """Yield notes on rates of the critic, on a run that trains nothing else, and on settings of a
    critic that the run does not have."""
    if not config.has_critic:
        for key, value in _written(config, cuts=True):
            yield (
                f"{key}: {value} has no effect: algorithm.adv_estimator="
                f"{config.algorithm.adv_estimator} has no critic"
            )
        return
    steps, warmup = config.trainer.total_training_steps, config.trainer.critic_warmup
    yield from _renamed(rate_notes(config.critic.optim, steps))
    if warmup >= steps:
        yield (
            f"trainer.critic_warmup: {warmup} are all of the run's {steps} steps or more, so only "
            "the critic is trained"
        )


def _renamed(texts: Iterator[str]) -> Iterator[str]:
    """The actor's rules hold for the critic's optimizer, under the critic's name."""
    return (text.replace(OPTIM, _OPTIM) for text in texts)


def _without_critic(config: RunConfig) -> Iterator[str]:
    if found := _written(config, cuts=False):
        key, value = found[0]
        more = f" and {len(found) - 1} more such settings" if len(found) > 1 else ""
        yield (
            f"{key}: found {value}{more}, but algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator} has no critic; write algorithm.adv_estimator=gae, "
            "or leave them out"
        )


def _written(config: RunConfig, cuts: bool) -> list[tuple[str, object]]:
    """Settings of a critic that say more than its defaults and the actor's values, as files that
    write every setting repeat them. `cuts`: those of memory and micro-batches, else the others."""
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
