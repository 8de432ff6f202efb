"""What a correction does: the levels of weights, the forms of rejection, and their bounds.

r is p_trainer / p_engine of a sampled token, as everywhere in this room.
"""

import math
from dataclasses import dataclass

WEIGHT_LEVELS = ("token", "sequence", "geometric")
"""A token's weight is its own r, the product of r over its sequence, or their geometric mean. The
last is of verl 0.6; later versions have it as a form of rejection only (seq_mean_k1)."""

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
"""verl's names: of what (a token; a sequence's sum, mean or largest), by which statistic:
k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r."""


@dataclass(frozen=True)
class Bounds:
    """An interval, its ends included. Example: Bounds(0.5, 2.0)."""

    lower: float | None
    """None: unbounded."""
    upper: float


NO_BOUNDS = Bounds(None, math.inf)
"""Of weights that are not made."""


@dataclass(frozen=True)
class Rejection:
    """One criterion. Example: Rejection('seq_mean_k3', Bounds(None, 0.01))."""

    form: str
    bounds: Bounds
    """Of the statistic itself: logarithms for k1."""

    @property
    def of_tokens(self) -> bool:
        """Whether single tokens are rejected, rather than sequences."""
        return self.form.startswith("token")


@dataclass(frozen=True)
class Correction:
    """Everything that is done to the tokens of a step."""

    level: str | None = None
    """One of WEIGHT_LEVELS; None: no weights."""
    bounds: Bounds = NO_BOUNDS
    """Of weights. Upper alone: larger weights are cut to it; both: weights outside are 0."""
    normalized: bool = False
    """Whether weights are divided by their mean over the step."""
    rejections: tuple[Rejection, ...] = ()
    """A token must pass all."""
    veto: float | None = None
    """A sequence with a token whose r is smaller is rejected; None: none is."""


def weight_bounds(threshold: float | str) -> Bounds:
    """Read rollout_is_threshold: 2.0, or '0.5_5.0'. Raises ValueError, saying what is expected."""
    lower, upper = _pair(str(threshold))
    if not _ordered(lower, upper):
        raise ValueError("expected a number > 0, or two as lower_upper, such as 0.5_5.0")
    return Bounds(lower, upper)


def rejections(forms: str, threshold: float | str | None) -> tuple[Rejection, ...]:
    """Read rollout_rs and rollout_rs_threshold.

    `forms` names one or several, between commas. Thresholds: one for all, or one each. For k1 they
    bound 1 / r, as verl's do: lower_upper, or one number u for 1/u to u. For k2 and k3 they are the
    largest value. Raises ValueError, saying what is expected.
    """
    names = list(dict.fromkeys(part.strip() for part in forms.split(",") if part.strip()))
    texts = [part.strip() for part in str(threshold).split(",") if part.strip()]
    if len(texts) not in (1, len(names)):
        raise ValueError(f"expected one threshold, or {len(names)} between commas")
    texts = texts * len(names) if len(texts) == 1 else texts
    return tuple(_rejection(*pair) for pair in zip(names, texts, strict=True))


def unknown_forms(forms: str) -> list[str]:
    """The parts of rollout_rs that are no form."""
    return [part for part in map(str.strip, forms.split(",")) if part not in REJECTION_FORMS]


def _rejection(form: str, text: str) -> Rejection:
    lower, upper = _pair(text)
    if not form.endswith("k1"):
        if lower is not None or not upper > 0:
            raise ValueError(f"expected one number > 0 for {form}, found {text}")
        return Rejection(form, Bounds(None, upper))
    if lower is None and upper > 0:
        lower = 1 / upper
    if lower is None or not _ordered(lower, upper):
        raise ValueError(
            f"expected two numbers > 0 as lower_upper for {form}, or one number >= 1, found {text}"
        )
    return Rejection(form, Bounds(math.log(lower), math.log(upper)))


def _pair(text: str) -> tuple[float | None, float]:
    """NaN for what is no number."""
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
