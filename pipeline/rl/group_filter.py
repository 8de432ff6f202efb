"""Dynamic sampling: which groups of a step are accepted, by a metric of their samples.

DAPO (arXiv 2503.14476, section 3.2) leaves out groups whose samples all have one accuracy, as their
advantages are 0, and samples further prompts until the batch is full. Names are verl's
(algorithm.filter_groups). Differences from verl: a sample whose reward function failed has no value
and counts in no group; so a group of fewer than two values has no variance. verl keeps groups of
one sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REWARD_METRICS = ("seq_reward", "seq_final_reward")
"""The reward, overlong penalty included. They differ in verl with algorithm.use_kl_in_reward."""
SCORE_METRICS = ("score", "acc")
"""What the reward function returned, without the overlong penalty. `acc` is that entry of its dict
where it has one, as in verl's DAPO reward manager."""
OVERLONG = "overlong_reward"
"""The entry of a sample's extras with the overlong penalty that its reward includes."""
FULL = "not needed: the step was full"
_DIGITS = 9
"""Decimals of a score from which a penalty is taken off again: a sum of doubles is rounded."""


@dataclass(frozen=True)
class ChosenGroups:
    """The groups of a step. Example: ChosenGroups(('000003/17',), {'000003/4': 'all alike'})."""

    accepted: tuple[str, ...]
    """In the order in which they were planned."""
    rejected: Mapping[str, str]
    """The reason of each of the others."""


def metric_value(metric: str, reward: float | None, extras: Mapping[str, Any]) -> float | None:
    """A sample's value of a metric; None: its reward function failed.

    Raises ValueError, saying what the sample has, when it has no such number.
    """
    if reward is None or metric in REWARD_METRICS:
        return reward
    if metric in SCORE_METRICS and metric not in extras:
        return round(reward - float(extras.get(OVERLONG, 0.0)), _DIGITS)
    value: object = extras.get(metric)
    if not isinstance(value, int | float):
        has = f"{value!r} there" if metric in extras else f"only {sorted(extras)}"
        raise ValueError(
            f"the reward function returned {has} beside the score, expected a number under "
            f"{metric!r}"
        )
    return float(value)


def choose(groups: Mapping[str, Sequence[float | None]], metric: str, wanted: int) -> ChosenGroups:
    """Accept the first `wanted` groups, in their order, whose values of a metric differ."""
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
