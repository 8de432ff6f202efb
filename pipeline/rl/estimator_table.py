"""The advantage estimators, by verl's names."""

from pipeline.rl.estimators.group import grpo
from pipeline.rl.estimators.types import EstimatorFunction

ESTIMATORS: dict[str, EstimatorFunction] = {"grpo": grpo}
