"""The learning algorithm; a part of the tree."""

from typing import Literal

from pydantic import Field

from pipeline.config.section import Section, formerly


class RolloutCorrection(Section):
    """Importance sampling between the engine's and the trainer's distribution."""

    rollout_is: Literal["token"] | None = Field(
        None, description="token: weight each token by min(p_trainer/p_engine, threshold)."
    )
    rollout_is_threshold: float = Field(2.0, gt=0, description="Upper bound of the weight.")


class Algorithm(Section):
    """The learning algorithm."""

    adv_estimator: Literal["grpo"] = Field("grpo", description="Advantage estimator.")
    norm_adv_by_std_in_grpo: bool = Field(
        True, description="Divide a group's advantages by its standard deviation."
    )
    mask_truncated_samples: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="true: no loss on responses that ended at data.max_response_length; their "
        "rewards still count in their group's mean (DAPO's overlong filtering).",
    )
    rollout_correction: RolloutCorrection = Field(default_factory=RolloutCorrection)
