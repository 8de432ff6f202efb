"""What happens around the reward function; a part of the tree."""

from typing import Literal

from pydantic import Field

from pipeline.config.section import FOR_WORKERS, Section, formerly


class OverlongBuffer(Section):
    """verl's soft penalty on long responses, of its reward manager `dapo`."""

    enable: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="Lower the reward of responses of more than data.max_response_length - len "
        "tokens, in proportion to the excess, down to penalty_factor less at full length.",
    )
    len: int = Field(
        0,
        ge=0,
        json_schema_extra=formerly(0),
        description="Tokens over which the penalty grows; 1 or more with enable.",
    )
    penalty_factor: float = Field(
        1.0, ge=0, json_schema_extra=formerly(1.0), description="The largest penalty."
    )


class RewardKwargs(Section):
    """Arguments of verl's reward managers."""

    overlong_buffer_cfg: OverlongBuffer = Field(default_factory=OverlongBuffer)


class Reward(Section):
    """What happens around the reward function: [rewards.md](rewards.md)."""

    on_error: Literal["fail", "mask"] = Field(
        "fail",
        description="A reward function that raises: fail the step naming the sample, or mask the "
        "sample (no part of its group's mean nor of the loss; counted). So does one that does not "
        "return in time, or that ends its process.",
    )
    timeout_s: float | None = Field(
        60.0,
        gt=0,
        json_schema_extra=FOR_WORKERS | formerly(None),
        description="Seconds that one call of the reward function may take before its process is "
        "ended; null: no limit.",
    )
    num_workers: int = Field(
        8,
        ge=1,
        json_schema_extra=FOR_WORKERS | formerly(1),
        description="Processes in each rollout worker that run the reward function, one sample "
        "each at a time, started when needed; raise it for functions that wait for a server.",
    )
    reward_kwargs: RewardKwargs = Field(default_factory=RewardKwargs)
