"""Rules for algorithm.rollout_correction, within the group and together with other settings."""

from collections.abc import Iterable, Iterator

from pipeline.config.algorithm import RolloutCorrection
from pipeline.config.tree import RunConfig
from pipeline.errors import nearest, shown
from pipeline.rl.corrections.forms import (
    PRESETS,
    REJECTION_FORMS,
    THRESHOLDS,
    rejections,
    unknown_forms,
    weight_bounds,
)

_KEY = "algorithm.rollout_correction"
_OLDER = {
    "token": "token_k1",
    "sequence": "seq_sum_k1",
    "geometric": "seq_mean_k1",
    "ppo_is_bypass": "bypass_ppo_clip",
    "pg_rs": "bypass_pg_geo_rs",
    "bypass_pg_rs": "bypass_pg_geo_rs",
    "tis": "decoupled_token_is",
}
"""The names used here, keyed by names from older versions of verl and from papers."""


def correction_problems(config: RunConfig) -> list[str]:
    """Return problems with corrections that are invalid, contradictory or missing."""
    correction = config.algorithm.rollout_correction
    return [
        *_preset_problems(correction),
        *_weight_problems(correction),
        *_rejection_problems(correction),
        *_contradictions(correction),
        *_bypass_problems(config),
        *_staleness_problems(config),
    ]


def correction_notes(config: RunConfig) -> Iterator[str]:
    """Yield a note on samples of an older policy that are rejected, but not weighted."""
    correction = config.algorithm.rollout_correction
    if config.trainer.max_staleness and correction.rollout_rs and not weights_stale_samples(config):
        yield (
            f"{_KEY}.rollout_rs: with trainer.max_staleness={config.trainer.max_staleness}, this "
            "setting only rejects; the accepted samples of an older policy are trained on without "
            f"weights ({_KEY}.rollout_is)"
        )


def _preset_problems(correction: RolloutCorrection) -> Iterator[str]:
    name = correction.preset
    if name is None:
        return
    if name not in PRESETS:
        yield (
            f"{_KEY}.preset: found {name!r}, expected one of {', '.join(PRESETS)}; "
            f"{_nearest(name, PRESETS)}"
        )
        return
    for setting, value in PRESETS[name].items():
        found = getattr(correction, setting)
        if setting not in THRESHOLDS and found != value:
            yield (
                f"{_KEY}.{setting}: found {shown(found)}, but {_KEY}.preset={name} sets "
                f"{shown(value)}; write {shown(value)}, or leave one of the two out"
            )


def _weight_problems(correction: RolloutCorrection) -> Iterator[str]:
    key, threshold = f"{_KEY}.rollout_is_threshold", correction.rollout_is_threshold
    if threshold is None:
        if correction.rollout_is is not None:
            yield (
                f"{key}: found null, but {_KEY}.rollout_is={correction.rollout_is} requires a "
                "threshold; write a number, such as 2.0"
            )
        return
    try:
        bounds = weight_bounds(threshold)
    except ValueError as error:
        yield f"{key}: found {threshold!r}, {error}; the default is 2.0"
        return
    if correction.rollout_is and not (bounds.lower or 0) <= 1 <= bounds.upper:
        yield (
            f"{key}: found {threshold!r}, but the bounds must include 1, the weight of a token to "
            "which both policies give the same probability; write 1 or more, or two numbers, such "
            "as 0.5_5.0"
        )


def _rejection_problems(correction: RolloutCorrection) -> Iterator[str]:
    forms, threshold = correction.rollout_rs, correction.rollout_rs_threshold
    if forms is None:
        return
    if unknown := unknown_forms(forms):
        name = unknown[0]
        yield (
            f"{_KEY}.rollout_rs: found {name!r}, expected {', '.join(REJECTION_FORMS)}, or several "
            f"separated by commas; {_nearest(name, REJECTION_FORMS)}"
        )
        return
    key = f"{_KEY}.rollout_rs_threshold"
    if threshold is None:
        yield (
            f"{key}: found null, but {_KEY}.rollout_rs={forms} requires a threshold; write a "
            "number, such as 2.0"
        )
        return
    try:
        read = rejections(forms, threshold)
    except ValueError as error:
        yield f"{key}: found {threshold!r}, {error}; correct it"
        return
    for one in read:
        if not (one.bounds.lower or 0) <= 0 <= one.bounds.upper:
            yield (
                f"{key}: found {threshold!r}, but the bounds of {one.form} must include 1, the "
                "ratio of a token to which both policies give the same probability; correct it"
            )


def _contradictions(correction: RolloutCorrection) -> Iterator[str]:
    if correction.rollout_is_batch_normalize and correction.rollout_is is None:
        yield (
            f"{_KEY}.rollout_is_batch_normalize: found True, but no weights are computed; "
            f"write {_KEY}.rollout_is=token or sequence, or False"
        )
    if correction.rollout_rs_threshold is not None and correction.rollout_rs is None:
        yield (
            f"{_KEY}.rollout_rs_threshold: found {correction.rollout_rs_threshold!r}, but nothing "
            f"is rejected; write {_KEY}.rollout_rs, such as seq_mean_k3, or leave it out"
        )
    if not correction.bypass_mode and correction.loss_type != "ppo_clip":
        yield (
            f"{_KEY}.loss_type: found reinforce, but this loss requires bypass_mode; write "
            f"{_KEY}.bypass_mode=True, or ppo_clip"
        )


def _bypass_problems(config: RunConfig) -> Iterator[str]:
    correction, actor = config.algorithm.rollout_correction, config.actor_rollout_ref.actor
    if not correction.bypass_mode:
        return
    found = f"{_KEY}.bypass_mode: found True, but"
    if actor.router_replay.mode == "R2":
        yield (
            f"{found} actor_rollout_ref.actor.router_replay.mode=R2 records its routes in the pass "
            "that bypass_mode leaves out; write R3 or disabled there, or False here"
        )
    loss_mode = actor.policy_loss.loss_mode
    if correction.loss_type == "reinforce" and loss_mode != "vanilla":
        yield (
            f"actor_rollout_ref.actor.policy_loss.loss_mode: found {loss_mode}, but "
            f"{_KEY}.loss_type=reinforce replaces this loss; write vanilla here, or ppo_clip there"
        )
    if correction.rollout_is is not None and correction.loss_type == "ppo_clip":
        yield (
            f"{_KEY}.rollout_is: found {correction.rollout_is}, but with bypass_mode PPO's own "
            "ratio already refers to the engine's probabilities; write null, or "
            f"{_KEY}.loss_type=reinforce"
        )
    if correction.rollout_is_batch_normalize:
        yield (
            f"{_KEY}.rollout_is_batch_normalize: found True, but with bypass_mode weights are "
            "computed for each micro-batch, before a step's mean is known; write False"
        )


def _staleness_problems(config: RunConfig) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    enough = (
        weights_stale_samples(config) or correction.rollout_rs or correction.uncorrected_staleness
    )
    if not config.trainer.max_staleness or enough:
        return
    why, fix = "", f"{_KEY}.rollout_is=token (or rollout_rs, or bypass_mode)"
    if correction.bypass_mode and correction.loss_type == "reinforce":
        why = f": {_KEY}.loss_type=reinforce has no weights"
        fix = f"{_KEY}.rollout_is=token (or rollout_rs)"
    elif correction.bypass_mode:
        loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={_loss_mode(config)}"
        why = f": {loss} has no ratio, so {_KEY}.bypass_mode does not change it"
        fix = f"{_KEY}.rollout_rs, or {_KEY}.bypass_mode=False with rollout_is=token"
    elif correction.rollout_token_veto_threshold is not None:
        veto = f"{_KEY}.rollout_token_veto_threshold"
        why = f": {veto} rejects only sequences with an extreme token"
    yield (
        f"trainer.max_staleness: found {config.trainer.max_staleness}, but nothing corrects for "
        f"samples of an older policy{why}; write {fix}, or {_KEY}.uncorrected_staleness=True to "
        "train without a correction"
    )


def weights_stale_samples(config: RunConfig) -> bool:
    """Return whether weights, or the ratio of the loss, correct for samples of an older policy."""
    correction = config.algorithm.rollout_correction
    of_ratio = correction.bypass_mode and correction.loss_type == "ppo_clip"
    has_ratio = _loss_mode(config) != "gpg"
    return correction.rollout_is is not None or (of_ratio and has_ratio)


def _loss_mode(config: RunConfig) -> str:
    return config.actor_rollout_ref.actor.policy_loss.loss_mode


def _nearest(name: str, names: Iterable[str]) -> str:
    return nearest(_OLDER.get(name, name), names, "write one of these")
