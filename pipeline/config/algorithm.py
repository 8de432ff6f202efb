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


class FilterGroups(Section):
    """Dynamic sampling (DAPO): groups without variance are replaced by further prompts."""

    enable: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="true: a step is trained on data.train_batch_size groups whose samples differ "
        "in `metric`; the others stay in the store with their reason.",
    )
    metric: str | None = Field(
        None,
        json_schema_extra=formerly(None),
        description="seq_reward: the reward; score, acc: without the overlong penalty (acc: that "
        "entry of the reward function's dict, if it has one); else another entry of that dict.",
    )
    max_num_gen_batches: int = Field(
        0,
        json_schema_extra=formerly(0),
        description="Batches of data.gen_batch_size prompts that a step may sample, at most; if "
        "they do not fill it, the run ends with an error. verl's 0, no limit, is refused: a step "
        "owns a window of so many batches, whether it needs them or not.",
    )


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
    filter_groups: FilterGroups = Field(default_factory=FilterGroups)
