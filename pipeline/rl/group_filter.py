"""Dynamic sampling: a metric of the samples decides which groups of a step are accepted.

DAPO (arXiv 2503.14476, section 3.2) leaves out groups whose samples all have the same accuracy,
because the advantages of such samples are 0. It samples further prompts until the batch is full.
Settings and metrics have verl's names (algorithm.filter_groups).

Differences from verl: a sample whose reward function failed has no value, and a group with fewer
than two values is rejected. verl keeps groups of one sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REWARD_METRICS = ("seq_reward", "seq_final_reward")
"""Metrics that are the reward, including the overlong penalty. In verl, the values of the two
metrics differ with algorithm.use_kl_in_reward."""
SCORE_METRICS = ("score", "acc")
"""Metrics that are the reward function's score, without the overlong penalty. If the reward
function returns an entry `acc`, the metric `acc` is that entry, as in verl's DAPO reward
manager."""
OVERLONG = "overlong_reward"
"""The entry in a sample's extras that holds the overlong penalty included in its reward."""
FULL = "not needed: the step was full"
_DIGITS = 9
"""Number of decimals to which a score is rounded after the penalty is subtracted from the reward.
The difference is inexact, because the reward was rounded when the penalty was added to the score.
"""


@dataclass(frozen=True)
class ChosenGroups:
    """The accepted and rejected groups of a step.

    Example: ChosenGroups(('000003/17',), {'000003/4': 'acc is 1 in all samples'}).
    """

    accepted: tuple[str, ...]
    """The accepted groups, in the order of the plan."""
    rejected: Mapping[str, str]
    """The rejected groups, with the reason for each."""


def metric_value(metric: str, reward: float | None, extras: Mapping[str, Any]) -> float | None:
    """Return the value of a metric for a sample; None if the reward function failed on it.

    Args:
        metric: Name of the metric (algorithm.filter_groups.metric).
        reward: The sample's reward; None if the reward function failed.
        extras: Further values that the reward function returned.

    Raises:
        ValueError: The extras do not contain a number under the metric's name. The message shows
            the value found, or the names of the extras.
    """
    if reward is None or metric in REWARD_METRICS:
        return reward
    if metric in SCORE_METRICS and metric not in extras:
        return round(reward - float(extras.get(OVERLONG, 0.0)), _DIGITS)
    value: object = extras.get(metric)
    if not isinstance(value, int | float):
        has = f"{value!r}" if metric in extras else f"only {sorted(extras)}"
        raise ValueError(
            f"the reward function returned {has} in addition to the score, expected a number under "
            f"{metric!r}"
        )
    return float(value)


def choose(groups: Mapping[str, Sequence[float | None]], metric: str, wanted: int) -> ChosenGroups:
    """Accept the first groups whose samples differ in a metric, and reject the others.

    Args:
        groups: The values of each group's samples, keyed by group, in the order of the plan.
        metric: Name of the metric, for the reasons.
        wanted: Number of groups to accept.
    """
    accepted: list[str] = []
    rejected: dict[str, str] = {}
    for group, values in groups.items():
        known = {value for value in values if value is not None}
        if len(known) > 1 and len(accepted) < wanted:
            accepted.append(group)
        elif len(known) > 1:
            rejected[group] = FULL
        elif sum(value is not None for value in values) < 2:
            rejected[group] = f"fewer than two samples have {metric}"
        else:
            rejected[group] = f"{metric} is {known.pop():g} in all samples"
    return ChosenGroups(tuple(accepted), rejected)
