"""Settings of the optimizer and its learning rates."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from pipeline.config.section import Count, Section


class Optim(Section):
    """Adam with decoupled weight decay."""

    lr: PositiveFloat = Field(1e-6, description="Learning rate after warm-up.")
    lr_warmup_init: NonNegativeFloat = Field(
        0.0, description="Learning rate from which warm-up starts."
    )
    lr_warmup_steps: NonNegativeInt = Field(0, description="Number of steps of linear warm-up.")
    lr_warmup_steps_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Length of the warm-up as a share of lr_decay_steps; used only if "
        "lr_warmup_steps is 0.",
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        "constant",
        description="How the rate declines from lr to min_lr after warm-up. constant: it stays at "
        "lr; WSD (warm-up, stable, decay): it stays at lr until the last lr_wsd_decay_steps steps.",
    )
    lr_decay_steps: Count | None = Field(
        None,
        description="Number of steps, including warm-up, after which the rate is min_lr; null: the "
        "number of steps that the run has when it is created. If the run is extended later, its "
        "schedule does not change.",
    )
    min_lr: NonNegativeFloat = Field(
        0.0,
        description="Minimum rate after warm-up; it has no effect with lr_decay_style=constant.",
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        "exponential",
        description="WSD: how the rate declines in the last lr_wsd_decay_steps steps.",
    )
    lr_wsd_decay_steps: Count | None = Field(
        None,
        description="WSD: number of steps over which the rate declines. The decline ends at step "
        "lr_decay_steps.",
    )
    weight_decay: NonNegativeFloat = Field(0.01, description="Decoupled weight decay.")
    weight_decay_on_norms: bool = Field(
        False,
        description="true: weight decay also applies to norms and biases (one-dimensional "
        "parameters).",
    )
    betas: list[Annotated[float, Ge(0), Lt(1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="Adam's betas."
    )
    use_precision_aware_optimizer: bool = Field(
        False,
        description="Store the gradients and Adam's moments in the data types that the next three "
        "settings select, and use Transformer Engine's FusedAdam (GPUs only).",
    )
    main_grads_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="With use_precision_aware_optimizer: data type in which gradients are stored "
        "and summed over ranks.",
    )
    exp_avg_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="With use_precision_aware_optimizer: data type of Adam's first moment.",
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="With use_precision_aware_optimizer: data type of Adam's second moment.",
    )
    override_optimizer_config: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of Megatron-core's OptimizerConfig, as in verl, such as "
        "optimizer_cpu_offload, optimizer_offload_fraction and adam_eps.",
    )
    clip_grad: NonNegativeFloat = Field(1.0, description="Maximum gradient norm; 0: no clipping.")
    skip_nonfinite: bool = Field(
        True,
        description="true: skip the optimizer step of each mini-batch whose gradient norm is not "
        "finite, and count these mini-batches (update/skipped, critic/skipped). The run ends at "
        "the fourth such mini-batch in a row. false: the run ends at the first such mini-batch.",
    )
