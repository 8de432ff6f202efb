"""Rewards, computed in the rollout worker: users' code runs in its writer's thread (handover)."""

from dataclasses import dataclass
from typing import Any

from operators.rollout.prompts import Wanted
from pipeline.rl.rewards import RewardError, RewardFunction, score


@dataclass(frozen=True)
class Scored:
    """A sample's reward, or the error that prevented it."""

    reward: float | None
    error: str | None
    extras: dict[str, Any]


@dataclass(frozen=True)
class Scorer:
    """The run's reward function, and the handling of its errors."""

    function: RewardFunction
    mask_errors: bool
    """reward.on_error: True for 'mask' (the sample has no reward), False for 'fail'."""

    def __call__(self, wanted: Wanted, text: str) -> Scored:
        """Score a response. Raises RewardError, naming the sample, unless errors are masked."""
        try:
            found = score(
                self.function,
                sample_id=wanted.id,
                data_source=wanted.prompt.data_source,
                solution_str=text,
                ground_truth=wanted.prompt.ground_truth,
                extra_info=wanted.prompt.extra_info,
            )
        except RewardError as error:
            if not self.mask_errors:
                raise
            return Scored(None, str(error), {})
        return Scored(found.reward, None, found.extras)
