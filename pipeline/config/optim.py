"""The optimizer and its rates; a part of the tree."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import Field

from pipeline.config.section import Section, formerly


class Optim(Section):
    """Adam with decoupled weight decay."""

    lr: float = Field(1e-6, gt=0, description="Learning rate after warm-up.")
    lr_warmup_init: float = Field(
        0.0,
        ge=0,
        json_schema_extra=formerly(0.0),
        description="Learning rate from which warm-up starts.",
    )
    lr_warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    lr_warmup_steps_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        json_schema_extra=formerly(0.0),
        description="Share of lr_decay_steps that is warm-up where lr_warmup_steps is 0.",
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        "constant",
        json_schema_extra=formerly("constant"),
        description="How the rate falls after warm-up, from lr to min_lr. WSD (warm-up, stable, "
        "decay) stays at lr until the last lr_wsd_decay_steps.",
    )
    lr_decay_steps: int | None = Field(
        None,
        ge=1,
        json_schema_extra=formerly(None),
        description="Steps, warm-up included, after which the rate is min_lr; null: as many as the "
        "run has when it is created. A run that is made longer keeps its schedule.",
    )
    min_lr: float = Field(
        0.0,
        ge=0,
        json_schema_extra=formerly(0.0),
        description="Lowest rate after warm-up; it has no effect with lr_decay_style=constant.",
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        "exponential",
        json_schema_extra=formerly("exponential"),
        description="WSD: how the rate falls in the last lr_wsd_decay_steps.",
    )
    lr_wsd_decay_steps: int | None = Field(
        None,
        ge=1,
        json_schema_extra=formerly(None),
        description="WSD: the last of lr_decay_steps, in which the rate falls.",
    )
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    weight_decay_on_norms: bool = Field(
        False,
        json_schema_extra=formerly(True),
        description="true: norms and biases (parameters of one dimension) decay too.",
    )
    betas: list[Annotated[float, Ge(0), Lt(1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="Adam betas."
    )
    use_precision_aware_optimizer: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="Keep gradients and Adam's moments in the types below, by Transformer Engine's "
        "FusedAdam (GPUs only).",
    )
    main_grads_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        json_schema_extra=formerly("fp32"),
        description="With use_precision_aware_optimizer: type of gradients, also while they are "
        "summed over ranks.",
    )
    exp_avg_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        json_schema_extra=formerly("fp32"),
        description="With use_precision_aware_optimizer: type of Adam's first moment.",
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        json_schema_extra=formerly("fp32"),
        description="With use_precision_aware_optimizer: type of Adam's second moment.",
    )
    override_optimizer_config: dict[str, Any] = Field(
        default_factory=dict,
        json_schema_extra=formerly({}),
        description="Fields of Megatron-core's OptimizerConfig, as in verl: "
        "optimizer_cpu_offload, optimizer_offload_fraction, adam_eps, ...",
    )
    clip_grad: float = Field(1.0, ge=0, description="Largest gradient norm; 0: no clipping.")
    skip_nonfinite: bool = Field(
        True,
        json_schema_extra=formerly(False),
        description="A mini-batch whose gradient norm is not finite: skip its optimizer step and "
        "count it (update/skipped), but end the run after 3 in a row; false: end the run at once.",
    )
