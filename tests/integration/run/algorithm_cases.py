"""Quickstart settings for each estimator, loss and correction, as users would write them."""

from typing import get_args

from pipeline.rl.corrections.forms import PRESETS
from pipeline.rl.estimator_table import ESTIMATORS
from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.aggregate import AggregationMode

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
BASE = "grpo"

SHARED = (f"{_ACTOR}.clip_ratio=0.01",)
"""Settings for all cases. In a narrow clip range, losses with and without clipping differ."""

_LOSS = {
    "clip_cov": ("clip_cov_ratio=0.2", "clip_cov_lb=-100", "clip_cov_ub=100"),
    "kl_cov": ("kl_cov_ratio=0.2",),
}
"""Settings that make Clip-Cov and KL-Cov choose tokens in a small mini-batch."""
_BOUNDS = {
    "decoupled_token_icepop": {"rollout_is_threshold": "0.9_1.1"},
    "decoupled_seq_is_rs": {"rollout_rs_threshold": "0.9_1.1"},
    "decoupled_geo_rs": {"rollout_rs_threshold": "0.99_1.01"},
    "bypass_pg_geo_rs_seq_tis": {"rollout_rs_threshold": "0.99_1.01"},
}
"""Bounds that make these presets keep some tokens or samples and reject others."""
_PRESETS = ("disabled", "decoupled_seq_is", *_BOUNDS, "bypass_ppo_clip", "bypass_pg_is")
"""Presets with token weights, sequence weights, rejections, and both bypass losses."""


def _loss(name: str) -> tuple[str, ...]:
    mode = LOSSES[name].aggregation
    aggregation = () if mode is None else (f"{_ACTOR}.loss_agg_mode={mode}",)
    own = tuple(f"{_ACTOR}.policy_loss.{word}" for word in _LOSS.get(name, ()))
    return (f"{_ACTOR}.policy_loss.loss_mode={name}", *own, *aggregation)


def _preset(name: str) -> tuple[str, ...]:
    # Preset names are not used here, because the quickstart sets some of the same settings.
    settings = PRESETS[name] | _BOUNDS.get(name, {})
    words = {key: "null" if value is None else value for key, value in settings.items()}
    return tuple(f"{_CORRECTION}.{key}={value}" for key, value in words.items())


def _estimator(name: str) -> tuple[str, ...]:
    critic = ("critic.optim.lr=1e-3",) if name == "gae" else ()
    return (f"algorithm.adv_estimator={name}", *critic)


_REWARD_KL = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1")
CASES: dict[str, tuple[str, ...]] = {
    **{name: _estimator(name) for name in ESTIMATORS},
    **{f"loss {name}": _loss(name) for name in LOSSES if name != "vanilla"},
    **{
        mode: (f"{_ACTOR}.loss_agg_mode={mode}",)
        for mode in get_args(AggregationMode)
        if mode != "token-mean"
    },
    **{name: _preset(name) for name in _PRESETS},
    "grpo without std": ("algorithm.norm_adv_by_std_in_grpo=False",),
    "kl loss": (f"{_ACTOR}.use_kl_loss=True", f"{_ACTOR}.kl_loss_coef=0.1"),
    "kl in reward": _REWARD_KL,
    "adaptive kl in reward": (
        *_REWARD_KL,
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
    ),
    "entropy": (f"{_ACTOR}.entropy_coeff=0.1",),
    "R2": (f"{_ACTOR}.router_replay.mode=R2",),
    "native": (f"{_ACTOR}.router_replay.mode=disabled",),
}
"""Quickstart settings, keyed by case."""
