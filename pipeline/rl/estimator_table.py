"""The advantage estimators, under verl's names."""

from pipeline.rl.estimators.advantage_formulas import (
    gae,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from pipeline.rl.estimators.types import Estimator, Need

_GROUP: frozenset[Need] = frozenset({"group"})
_BY_STD = ("norm_adv_by_std_in_grpo",)

ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(
        grpo, "(score - group mean) / group standard deviation", "2402.03300", _GROUP, _BY_STD
    ),
    "grpo_passk": Estimator(
        grpo_passk,
        "best sample of the group: (score - second best score) / group standard deviation; other "
        "samples: 0",
        "2503.19595",
        _GROUP,
        _BY_STD,
    ),
    "rloo": Estimator(rloo, "score - mean of the group's other samples", "2402.14740", _GROUP),
    "opo": Estimator(
        opo, "score - length-weighted mean of the group's scores", "2505.23585", _GROUP
    ),
    "gpg": Estimator(
        gpg,
        "(score - group mean) * number of samples / number of samples with a score other than 0",
        "2504.02546",
        _GROUP,
    ),
    "reinforce_plus_plus": Estimator(
        reinforce_plus_plus,
        "discounted sum of the scores from the token on; whitened over all tokens",
        "2501.03262",
        settings=("gamma",),
    ),
    "reinforce_plus_plus_baseline": Estimator(
        reinforce_plus_plus_baseline,
        "score - group mean; whitened over all tokens",
        "2501.03262",
        _GROUP,
    ),
    "remax": Estimator(
        remax,
        "score - score of a greedy sample of the same prompt",
        "2310.10505",
        frozenset({"baseline"}),
    ),
    "gae": Estimator(
        gae,
        "discounted sum, from the token on, of the temporal-difference errors of a critic's "
        "values; whitened over all tokens",
        "1506.02438",
        frozenset({"values"}),
        ("gamma", "lam"),
    ),
}


def needs_baseline(name: str) -> bool:
    """Return whether an estimator needs greedy samples (users' estimators do not)."""
    estimator = ESTIMATORS.get(name)
    return estimator is not None and "baseline" in estimator.needs
