"""Settings for the reward function."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from pipeline.config.section import FOR_WORKERS, Count, Section


class OverlongBuffer(Section):
    """The soft penalty on long responses, as in verl's reward manager `dapo`."""

    enable: bool = Field(
        False,
        description="Lower the reward of responses that have more than data.max_response_length - "
        "len tokens, in proportion to the excess. The penalty for a response of the maximum length "
        "is penalty_factor.",
    )
    len: NonNegativeInt = Field(
        0,
        description="Number of tokens over which the penalty grows; it must be at least 1 if "
        "enable is true.",
    )
    penalty_factor: NonNegativeFloat = Field(1.0, description="The maximum penalty.")


class RewardKwargs(Section):
    """Arguments of verl's reward managers."""

    overlong_buffer_cfg: OverlongBuffer = Field(default_factory=OverlongBuffer)


class Reward(Section):
    """Settings for the reward function (see [rewards.md](rewards.md))."""

    on_error: Literal["fail", "mask"] = Field(
        "fail",
        description="Reaction to a reward function that raises an error, exceeds timeout_s or ends "
        "its process. fail: end the step with an error that names the sample; mask: exclude the "
        "sample from its group's mean and from the loss, and count it (reward/masked).",
    )
    timeout_s: Annotated[PositiveFloat | None, FOR_WORKERS] = Field(
        60.0,
        description="Time limit for one call of the reward function, in seconds. A process that "
        "exceeds the limit is terminated. null: no limit.",
    )
    num_workers: Annotated[Count, FOR_WORKERS] = Field(
        8,
        description="Number of processes that run the reward function in each rollout worker; "
        "each process scores one sample at a time. The processes start when they are needed. "
        "Increase this number for functions that wait for a server.",
    )
    reward_kwargs: RewardKwargs = Field(default_factory=RewardKwargs)
