"""The definition of corrections: levels of weights, forms of rejection, bounds, verl's presets.

In this package, r is the ratio p_trainer / p_engine of a sampled token's probabilities.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

WEIGHT_LEVELS = ("token", "sequence", "geometric")
"""The levels of a token's weight: its own r, the product of r over its sequence, or the geometric
mean of r over its sequence. The last level comes from verl 0.6; later versions of verl offer it
only as a form of rejection (seq_mean_k1)."""

REJECTION_FORMS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)
"""verl's names for the forms of rejection. A name gives the scope (a token, or a sequence's sum,
mean or largest value) and the statistic: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r."""


@dataclass(frozen=True)
class Bounds:
    """A closed interval. Example: Bounds(0.5, 2.0)."""

    lower: float | None
    """The lower bound; None if there is no lower bound."""
    upper: float


NO_BOUNDS = Bounds(None, math.inf)
"""The bounds for a correction without weights."""


@dataclass(frozen=True)
class Rejection:
    """A rejection criterion. Example: Rejection('seq_mean_k3', Bounds(None, 0.01))."""

    form: str
    bounds: Bounds
    """Bounds on the statistic; for k1, these are logarithms."""

    @property
    def of_tokens(self) -> bool:
        """Whether the form rejects individual tokens rather than sequences."""
        return self.form.startswith("token")


@dataclass(frozen=True)
class Correction:
    """The weights and rejections that are applied to the tokens of a step."""

    level: str | None = None
    """One of WEIGHT_LEVELS; None for a correction without weights."""
    bounds: Bounds = NO_BOUNDS
    """Bounds on the weights. With only an upper bound, larger weights are clipped to it. With both
    bounds, weights outside them are set to 0."""
    normalized: bool = False
    """Whether weights are divided by their mean over the step."""
    rejections: tuple[Rejection, ...] = ()
    """The rejection criteria, all of which a token must pass."""
    veto: float | None = None
    """The smallest r that a token may have; a sequence is rejected if any of its tokens has a
    smaller r. None disables the veto."""

    @property
    def needs_engine(self) -> bool:
        """Whether the correction depends on the engine's log-probs."""
        return self.level is not None or bool(self.rejections) or self.veto is not None


def weight_bounds(threshold: float | str) -> Bounds:
    """Parse rollout_is_threshold, for example 2.0 or '0.5_5.0'.

    Raises a ValueError that gives the expected format.
    """
    lower, upper = _pair(str(threshold))
    if not _ordered(lower, upper):
        raise ValueError(
            "expected a number > 0, or two numbers in the form lower_upper, such as 0.5_5.0"
        )
    return Bounds(lower, upper)


def rejections(forms: str, threshold: float | str | None) -> tuple[Rejection, ...]:
    """Parse rollout_rs and rollout_rs_threshold.

    `forms` contains one or more forms, separated by commas. `threshold` contains one threshold for
    all forms, or one for each. For k1, a threshold bounds 1 / r, as in verl. It has the form
    `lower_upper`, or is a single number u, which means the range from 1/u to u. For k2 and k3, a
    threshold is the largest allowed value. Raises a ValueError that gives the expected format.
    """
    names = list(dict.fromkeys(part.strip() for part in forms.split(",") if part.strip()))
    texts = [part.strip() for part in str(threshold).split(",") if part.strip()]
    if len(texts) not in (1, len(names)):
        raise ValueError(f"expected one threshold, or {len(names)} separated by commas")
    texts = texts * len(names) if len(texts) == 1 else texts
    return tuple(_rejection(*pair) for pair in zip(names, texts, strict=True))


def unknown_forms(forms: str) -> list[str]:
    """Return the names in rollout_rs that are not forms of rejection."""
    return [part for part in map(str.strip, forms.split(",")) if part not in REJECTION_FORMS]


def _rejection(form: str, text: str) -> Rejection:
    lower, upper = _pair(text)
    if not form.endswith("k1"):
        if lower is not None or not upper > 0:
            raise ValueError(f"expected one number > 0 for {form}")
        return Rejection(form, Bounds(None, upper))
    if lower is None and upper > 0:
        lower = 1 / upper
    if lower is None or not _ordered(lower, upper):
        raise ValueError(
            f"expected two numbers > 0 for {form}, such as 0.5_2.0, or one number >= 1"
        )
    return Rejection(form, Bounds(math.log(lower), math.log(upper)))


def _pair(text: str) -> tuple[float | None, float]:
    """Split a threshold into its bounds; a bound is NaN if its text is not a finite number."""
    lower, _, upper = text.rpartition("_")
    return (_number(lower) if lower else None), _number(upper)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _ordered(lower: float | None, upper: float) -> bool:
    return 0 < (upper if lower is None else lower) <= upper


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
"""verl's combinations of corrections, named after RolloutCorrectionConfig's constructors."""

THRESHOLDS = frozenset({"rollout_is_threshold", "rollout_rs_threshold"})
"""Settings whose values may differ from a preset's, because verl's constructors take them as
arguments."""
