"""Notes on settings that differ from their defaults although the run does not read them."""

from collections.abc import Iterable, Iterator

from pipeline.config.keys import setting_keys, value_at
from pipeline.config.ref import LogProbCut
from pipeline.config.rules.algorithms.corrections import weights_stale_samples
from pipeline.config.rules.budget import budget, passes_of
from pipeline.config.tree import RunConfig
from pipeline.rl.estimator_table import ESTIMATORS
from pipeline.rl.loss_table import LOSSES

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_CORRECTION = "algorithm.rollout_correction"


def unused_notes(config: RunConfig) -> Iterator[str]:
    """Yield a note on each setting that the user changed and that has no effect in this run."""
    why = {key: reason for reason, keys in _unread(config) for key in keys}
    for key in setting_keys():
        value = value_at(config, key.name)
        if key.name in why and value not in (key.default, None):
            yield f"{key.name}: {value} has no effect{why[key.name]}"


def _unread(config: RunConfig) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield a reason, and the keys of the settings that the run therefore does not read."""
    yield from _unread_by_loss(config)
    yield from _unread_by_algorithm(config)
    correction, deltas = config.algorithm.rollout_correction, config.store.policy_deltas
    if correction.rollout_is is None:
        yield f" without {_CORRECTION}.rollout_is", [f"{_CORRECTION}.rollout_is_threshold"]
    uncorrected = [f"{_CORRECTION}.uncorrected_staleness"]
    if not config.trainer.max_staleness:
        yield " without trainer.max_staleness=1", uncorrected
    elif weights_stale_samples(config) or correction.rollout_rs:
        yield ", because samples of an older policy are corrected", uncorrected
    if deltas.enable is False:
        yield " with store.policy_deltas.enable=false", ["store.policy_deltas.every"]
    limits = [budget(config, one) for one in passes_of(config)]
    budgets = {
        f"{_ACTOR}.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    }
    yield (
        ", because micro-batches are formed by number of samples; write "
        f"{_ACTOR}.use_dynamic_bsz=true to form them by token count",
        budgets - {one.tokens_key for one in limits if one.tokens is not None},
    )
    for optim in (f"{_ACTOR}.optim", *(["critic.optim"] if config.has_critic else [])):
        if value_at(config, f"{optim}.lr_decay_style") == "constant":
            reason = f" with {optim}.lr_decay_style=constant, as in Megatron-core"
            yield reason, [f"{optim}.min_lr"]
    if not config.has_reference:
        keys = [f"{_REF}.megatron.param_offload"]
        keys += [f"{_REF}.{name}" for name in LogProbCut.model_fields]
        keys += [] if config.has_critic else [f"{_ACTOR}.megatron.param_offload"]
        yield (
            f", because without {_ACTOR}.use_kl_loss or algorithm.use_kl_in_reward there is no "
            "reference policy",
            [key for key in keys if value_at(config, key)],
        )


def _unread_by_loss(config: RunConfig) -> Iterator[tuple[str, Iterable[str]]]:
    actor = config.actor_rollout_ref.actor
    mode = actor.policy_loss.loss_mode
    if mode not in LOSSES:
        return  # a user's function may read any setting
    read = LOSSES[mode].reads
    if None not in (actor.clip_ratio_low, actor.clip_ratio_high):
        yield ", because clip_ratio_low and clip_ratio_high are set", [f"{_ACTOR}.clip_ratio"]
    others = {name for loss in LOSSES.values() for name in loss.reads} - {*read}
    yield f" with {_ACTOR}.policy_loss.loss_mode={mode}", [f"{_ACTOR}.{name}" for name in others]


def _unread_by_algorithm(config: RunConfig) -> Iterator[tuple[str, Iterable[str]]]:
    algorithm = config.algorithm
    if (estimator := ESTIMATORS.get(algorithm.adv_estimator)) is not None:
        of_others = {name for one in ESTIMATORS.values() for name in one.settings}
        for name in of_others - {*estimator.settings}:
            readers = [other for other, one in ESTIMATORS.items() if name in one.settings]
            yield f" without algorithm.adv_estimator={' or '.join(readers)}", [f"algorithm.{name}"]
    if not algorithm.use_kl_in_reward:
        control = type(algorithm.kl_ctrl).model_fields
        keys = ["algorithm.kl_penalty", *(f"algorithm.kl_ctrl.{name}" for name in control)]
        yield " without algorithm.use_kl_in_reward=true", keys
    elif algorithm.kl_ctrl.type == "fixed":
        keys = ["algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"]
        yield " without algorithm.kl_ctrl.type=adaptive", keys
    filters = algorithm.filter_groups
    if not filters.enable:
        keys = [f"algorithm.filter_groups.{name}" for name in type(filters).model_fields]
        yield " without algorithm.filter_groups.enable=true", keys
