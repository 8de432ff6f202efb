"""Rules of the corrections under algorithm.rollout_correction, and with other settings."""

import difflib
from collections.abc import Iterable, Iterator

from pipeline.config.algorithm import RolloutCorrection
from pipeline.config.tree import RunConfig
from pipeline.rl.corrections.forms import (
    REJECTION_FORMS,
    rejections,
    unknown_forms,
    weight_bounds,
)
from pipeline.rl.corrections.presets import PRESETS, THRESHOLDS

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
"""Names of older versions of verl and of papers, and what they are called here."""


def correction_problems(config: RunConfig) -> list[str]:
    """Corrections that cannot be read, contradict each other or the rest, or are missing."""
    correction = config.algorithm.rollout_correction
    return [
        *_preset_problems(correction),
        *_weight_problems(correction),
        *_rejection_problems(correction),
        *_contradictions(correction),
        *_bypass_problems(config),
        *_staleness_problems(config),
    ]


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
                f"{_KEY}.{setting}: found {_text(found)}, but {_KEY}.preset={name} is "
                f"{_text(value)}; leave one of the two out"
            )


def _weight_problems(correction: RolloutCorrection) -> Iterator[str]:
    key, threshold = f"{_KEY}.rollout_is_threshold", correction.rollout_is_threshold
    if threshold is None:
        if correction.rollout_is is not None:
            yield (
                f"{key}: found null, but {_KEY}.rollout_is={correction.rollout_is} needs one; "
                "write such as 2.0"
            )
        return
    try:
        bounds = weight_bounds(threshold)
    except ValueError as error:
        yield f"{key}: found {threshold!r}, {error}; the default is 2.0"
        return
    if correction.rollout_is and not (bounds.lower or 0) <= 1 <= bounds.upper:
        yield (
            f"{key}: found {threshold!r}, but 1, the weight of a token that both policies hold as "
            "likely, must lie inside; write 1 or more, or two numbers in quotes, such as "
            "'0.5_5.0' (without quotes 0.5_5 is 0.55)"
        )


def _rejection_problems(correction: RolloutCorrection) -> Iterator[str]:
    forms, threshold = correction.rollout_rs, correction.rollout_rs_threshold
    if forms is None:
        return
    if unknown := unknown_forms(forms):
        name = unknown[0]
        yield (
            f"{_KEY}.rollout_rs: found {name!r}, expected {', '.join(REJECTION_FORMS)}, or several "
            f"between commas; {_nearest(name, REJECTION_FORMS)}"
        )
        return
    key = f"{_KEY}.rollout_rs_threshold"
    if threshold is None:
        yield f"{key}: found null, but {_KEY}.rollout_rs={forms} needs one; write such as 2.0"
        return
    try:
        read = rejections(forms, threshold)
    except ValueError as error:
        yield f"{key}: found {threshold!r}, {error}; correct it"
        return
    for one in read:
        if not (one.bounds.lower or 0) <= 0 <= one.bounds.upper:
            yield (
                f"{key}: found {threshold!r}, but 1, the ratio of a token that both policies hold "
                f"as likely, must lie inside the bounds of {one.form}; correct it"
            )


def _contradictions(correction: RolloutCorrection) -> Iterator[str]:
    if correction.rollout_is_batch_normalize and correction.rollout_is is None:
        yield (
            f"{_KEY}.rollout_is_batch_normalize: found True, but there are no weights to "
            f"normalize; write {_KEY}.rollout_is=token or sequence, or False"
        )
    if correction.rollout_rs_threshold is not None and correction.rollout_rs is None:
        yield (
            f"{_KEY}.rollout_rs_threshold: found {correction.rollout_rs_threshold!r}, but nothing "
            f"is rejected; write {_KEY}.rollout_rs, such as seq_mean_k3, or leave it out"
        )
    if not correction.bypass_mode and correction.loss_type != "ppo_clip":
        yield (
            f"{_KEY}.loss_type: found reinforce, but it belongs to bypass_mode; write "
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
            "that it leaves out; write R3 or disabled there, or False here"
        )
    loss_mode = actor.policy_loss.loss_mode
    if correction.loss_type == "reinforce" and loss_mode != "vanilla":
        yield (
            f"actor_rollout_ref.actor.policy_loss.loss_mode: found {loss_mode}, but "
            f"{_KEY}.loss_type=reinforce is the loss; write vanilla, or ppo_clip there"
        )
    if correction.rollout_is is not None and correction.loss_type == "ppo_clip":
        yield (
            f"{_KEY}.rollout_is: found {correction.rollout_is}, but with bypass_mode PPO's own "
            f"ratio is to the engine already; write null, or {_KEY}.loss_type=reinforce"
        )
    if correction.rollout_is_batch_normalize:
        yield (
            f"{_KEY}.rollout_is_batch_normalize: found True, but with bypass_mode weights are made "
            "micro-batch by micro-batch, before a step's mean is known; write False"
        )


def _staleness_problems(config: RunConfig) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    corrects = correction.corrects
    if config.actor_rollout_ref.actor.policy_loss.loss_mode == "gpg":  # it has no ratio
        corrects = correction.rollout_is is not None or correction.rejects
    if config.trainer.max_staleness and not (corrects or correction.uncorrected_staleness):
        yield (
            f"trainer.max_staleness: found {config.trainer.max_staleness}, but nothing corrects "
            f"for samples of an older policy; write {_KEY}.rollout_is=token (or rollout_rs, or "
            f"bypass_mode), or {_KEY}.uncorrected_staleness=True to train on them as they are"
        )


def _nearest(name: str, names: Iterable[str]) -> str:
    meant = _OLDER.get(name, name)
    close = difflib.get_close_matches(meant, list(names), 1, 0.0)
    return f"did you mean {close[0]}?"


def _text(value: object) -> str:
    return "null" if value is None else str(value)
