"""Rules of replay and recording, with other settings and the model; reasons in docs/replay.md.

transformer_rules.py has the fields of Megatron-core that are incompatible with replay.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.config.tree import RunConfig
from pipeline.model.families import FAMILIES
from pipeline.model.geometry import Geometry

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_RECORD = f"{_ROLLOUT}.enable_rollout_routing_replay"
_MODE = f"{_ACTOR}.router_replay.mode"


def replay_problems(
    config: RunConfig, hf_config: Mapping[str, Any] | None, geometry: Geometry | None
) -> list[str]:
    """Problems that prevent replay (or recording) with these settings and this model."""
    replay = config.actor_rollout_ref.actor.router_replay
    recording = config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    problems = []
    if replay.mode == "R3" and not recording:
        problems.append(
            f"{_RECORD}: found False, but {_MODE}=R3 replays what the rollout engine chose; "
            f"add the line {_RECORD}=True"
        )
    if (replay.mode != "disabled" or recording) and hf_config is not None and geometry is None:
        key, value = (_MODE, replay.mode) if replay.mode != "disabled" else (_RECORD, "True")
        off = "disabled" if key == _MODE else "False"
        problems.append(
            f"{key}: found {value}, but the model (model_type {hf_config.get('model_type')!r}) "
            f"has no MoE layers, so there are no routes; write {off}, or take a model of "
            f"{', '.join(name for name, family in FAMILIES.items() if family.moe)}"
        )
    if replay.mode != "disabled":
        problems += _sampling_problems(config)
    return problems


def replay_notes(config: RunConfig) -> list[str]:
    """Notes on health that is hard to reach, and on routes that are recorded but not replayed."""
    return [*_agreement_notes(config), *_unreplayed_notes(config)]


def _agreement_notes(config: RunConfig) -> list[str]:
    replay = config.actor_rollout_ref.actor.router_replay
    if replay.mode == "disabled" or replay.min_agreement <= 0.5:
        return []
    return [
        f"{_ACTOR}.router_replay.min_agreement: {replay.min_agreement} is high: numerics alone "
        "make routers disagree, so right routes may be found unhealthy"
    ]


def _unreplayed_notes(config: RunConfig) -> list[str]:
    mode = config.actor_rollout_ref.actor.router_replay.mode
    if not config.actor_rollout_ref.rollout.enable_rollout_routing_replay or mode == "R3":
        return []
    if mode == "R2":
        return [f"{_RECORD}: the engine's routes are recorded, but R2 replays the trainer's own"]
    return [f"{_RECORD}: the engine's routes are recorded, but not replayed ({_MODE} is disabled)"]


def _sampling_problems(config: RunConfig) -> list[str]:
    rollout = config.actor_rollout_ref.rollout
    why = (
        "with replay on, the engine's log-probs must be of the whole distribution, "
        "not of what sampling keeps of it"
    )
    problems = []
    if rollout.top_p < 1:
        problems.append(f"{_ROLLOUT}.top_p: found {rollout.top_p}; {why}; write 1.0")
    if rollout.top_k > 0:
        problems.append(f"{_ROLLOUT}.top_k: found {rollout.top_k}; {why}; write -1")
    return problems
