"""Rules for replay, recording and sampling: which settings and models they are compatible with.

docs/replay.md gives the reasons. transformer_rules.py lists the fields of Megatron-core that are
incompatible with replay.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.tree import RunConfig
from pipeline.model.families import FAMILIES, moe_geometry

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_RECORD = f"{_ROLLOUT}.enable_rollout_routing_replay"
_MODE = f"{_ACTOR}.router_replay.mode"


def replay_problems(config: RunConfig, hf_config: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield problems that prevent replay or recording with these settings and this model.

    Args:
        config: The settings.
        hf_config: The model's config.json; None if it is not known.
    """
    replay = config.actor_rollout_ref.actor.router_replay
    recording = config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    if replay.mode == "R3" and not recording:
        yield (
            f"{_RECORD}: found False, but {_MODE}=R3 replays the routes of the rollout engine; "
            f"add {_RECORD}=True"
        )
    if hf_config is None or moe_geometry(hf_config) is not None:
        return
    if replay.mode != "disabled" or recording:
        key, value = (_MODE, replay.mode) if replay.mode != "disabled" else (_RECORD, "True")
        off = "disabled" if key == _MODE else "False"
        yield (
            f"{key}: found {value}, but the model (model_type {hf_config.get('model_type')!r}) "
            f"has no MoE layers, so there are no routes; write {off}, or use a model of one of "
            "the families "
            f"{', '.join(name for name, family in FAMILIES.items() if family.moe)}"
        )


def replay_notes(config: RunConfig) -> Iterator[str]:
    """Yield notes on a high min_agreement, and on recorded routes that are not replayed."""
    replay = config.actor_rollout_ref.actor.router_replay
    if replay.mode != "disabled" and replay.min_agreement > 0.5:
        yield (
            f"{_ACTOR}.router_replay.min_agreement: {replay.min_agreement} is high; rounding alone "
            "makes routers disagree, so correct routes may count as unhealthy"
        )
    if config.actor_rollout_ref.rollout.enable_rollout_routing_replay and replay.mode != "R3":
        is_off = replay.mode == "disabled"
        why = f"not replayed ({_MODE} is disabled)" if is_off else "R2 replays the trainer's routes"
        yield f"{_RECORD}: the engine's routes are recorded, but {why}"


def sampling_problems(config: RunConfig) -> Iterator[str]:
    """Yield a problem for each setting that restricts sampling in training rollouts.

    The engine's log-probs refer to the tokens that such a setting keeps, and the trainer's to the
    entire vocabulary. No loss or correction can tell this difference from a change of the policy.
    """
    rollout = config.actor_rollout_ref.rollout
    why = (
        "the engine's log-probs would refer only to the tokens that it keeps, and the trainer's to "
        "the entire vocabulary, so the importance ratios would be wrong"
    )
    fix = f"or leave it out; validation may use {_ROLLOUT}.val_kwargs"
    if rollout.top_p < 1:
        yield f"{_ROLLOUT}.top_p: found {rollout.top_p}; {why}; write 1.0, {fix}.top_p"
    if rollout.top_k > 0:
        yield f"{_ROLLOUT}.top_k: found {rollout.top_k}; {why}; write -1, {fix}.top_k"
