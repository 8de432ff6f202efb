"""verl's combinations of corrections, named after RolloutCorrectionConfig's constructors."""

from types import MappingProxyType
from typing import Any

_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_NO_RS = {"rollout_rs": None, "rollout_rs_threshold": None}
_NO_IS = {"rollout_is": None, "rollout_is_threshold": 2.0}
_TOKEN = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_DECOUPLED = {"bypass_mode": False, "loss_type": "ppo_clip"}
_CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
_PG = {"bypass_mode": True, "loss_type": "reinforce"}
_SEQ_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}

PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "disabled": _NO_IS | _NO_RS | _DECOUPLED,
        "decoupled_token_is": _TOKEN | _NO_RS | _DECOUPLED,
        "decoupled_seq_is": _SEQ | _NO_RS | _DECOUPLED,
        "decoupled_token_icepop": _ICEPOP | _NO_RS | _DECOUPLED,
        "decoupled_seq_is_rs": _SEQ | _SEQ_RS | _DECOUPLED,
        "decoupled_geo_rs": _NO_IS | _GEO | _DECOUPLED,
        "decoupled_geo_rs_seq_tis": _SEQ | _GEO | _DECOUPLED,
        "decoupled_geo_rs_token_tis": _TOKEN | _GEO | _DECOUPLED,
        "decoupled_k3_rs": _NO_IS | _K3 | _DECOUPLED,
        "decoupled_k3_rs_seq_tis": _SEQ | _K3 | _DECOUPLED,
        "decoupled_k3_rs_token_tis": _TOKEN | _K3 | _DECOUPLED,
        "bypass_ppo_clip": _NO_IS | _NO_RS | _CLIP,
        "bypass_ppo_clip_geo_rs": _NO_IS | _GEO | _CLIP,
        "bypass_ppo_clip_k3_rs": _NO_IS | _K3 | _CLIP,
        "bypass_pg_is": _SEQ | _NO_RS | _PG,
        "bypass_pg_token_icepop": _ICEPOP | _NO_RS | _PG,
        "bypass_pg_geo_rs": _NO_IS | _GEO | _PG,
        "bypass_pg_geo_rs_seq_tis": _SEQ | _GEO | _PG,
        "bypass_pg_geo_rs_token_tis": _TOKEN | _GEO | _PG,
    }
)

THRESHOLDS = frozenset({"rollout_is_threshold", "rollout_rs_threshold"})
"""Settings whose values may differ from a preset's, because verl's constructors take them as
arguments."""
