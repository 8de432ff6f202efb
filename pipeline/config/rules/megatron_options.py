"""Rules for override_optimizer_config and override_ddp_config: options of Megatron-core.

Each field of Megatron-core 0.16.1's OptimizerConfig and DistributedDataParallelConfig is passed
through, has its own setting, or is refused with a reason. A test compares the tables with the
originals, because `pipeline` does not import Megatron.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipeline.config.actor import Actor, Megatron
from pipeline.config.rules.rates import OPTIM
from pipeline.config.rules.transformer_rules import MEGATRON
from pipeline.errors import nearest, shown

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_ADAM = "the optimizer is Adam"
_BF16 = "losses are not scaled, because weights are bfloat16 or float32"
_FP8 = "weights are bfloat16 or float32"
_FSDP = "Megatron-FSDP is not supported; weights are split by TP, PP and EP"
_LOGS = "this option belongs to Megatron's own training loop"
_ONE_RATE = "all weights have one learning rate"


@dataclass(frozen=True)
class Options:
    """The treatment of the fields of one of Megatron-core's dataclasses."""

    key: str
    """The setting that contains the values."""
    megatron_name: str
    """The name of the dataclass."""
    types: Mapping[str, Any]
    """Fields that are passed through, and the types of their values."""
    owned: Mapping[str, str]
    """Fields that have their own setting, and the setting's name."""
    refused: Mapping[str, str]
    """Fields that are refused, and the reasons."""


OPTIMIZER = Options(
    key=f"{OPTIM}.override_optimizer_config",
    megatron_name="OptimizerConfig",
    types={
        "adam_eps": float,
        "apply_wd_to_qk_layernorm": bool,
        "decoupled_weight_decay": bool,
        "optimizer_cpu_offload": bool,
        "optimizer_offload_fraction": float,
        "overlap_cpu_optimizer_d2h_h2d": bool,
        "pin_cpu_grads": bool,
        "pin_cpu_params": bool,
        "store_param_remainders": bool,
        "use_precision_aware_optimizer": bool,
        "use_torch_optimizer_for_cpu_offload": bool,
    },
    owned={
        "lr": f"{OPTIM}.lr",
        "min_lr": f"{OPTIM}.min_lr",
        "weight_decay": f"{OPTIM}.weight_decay",
        "adam_beta1": f"{OPTIM}.betas",
        "adam_beta2": f"{OPTIM}.betas",
        "clip_grad": f"{OPTIM}.clip_grad",
        "main_grads_dtype": f"{OPTIM}.main_grads_dtype",
        "exp_avg_dtype": f"{OPTIM}.exp_avg_dtype",
        "exp_avg_sq_dtype": f"{OPTIM}.exp_avg_sq_dtype",
        "bf16": f"{MEGATRON}.dtype",
        "params_dtype": f"{MEGATRON}.dtype",
        "use_distributed_optimizer": f"{MEGATRON}.use_distributed_optimizer",
    },
    refused={
        **dict.fromkeys(("decoupled_lr", "decoupled_min_lr"), _ONE_RATE),
        **dict.fromkeys(("fp16", "loss_scale", "initial_loss_scale", "min_loss_scale"), _BF16),
        **dict.fromkeys(("loss_scale_window", "hysteresis"), _BF16),
        **dict.fromkeys(("fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"), _FP8),
        **dict.fromkeys(
            (
                "optimizer",
                "sgd_momentum",
                *(f"muon_{name}" for name in ("momentum", "split_qkv", "use_nesterov")),
                *(f"muon_{name}" for name in ("scale_mode", "fp32_matmul_prec", "num_ns_steps")),
                *(f"muon_{name}" for name in ("tp_mode", "extra_scale_factor")),
            ),
            _ADAM,
        ),
        "main_params_dtype": "the weights that Adam updates are float32, as in checkpoints",
        **dict.fromkeys(
            ("overlap_param_gather", "overlap_param_gather_with_optimizer_step"),
            "weights are gathered before they are read",
        ),
        **dict.fromkeys(
            ("log_num_zeros_in_grad", "barrier_with_L1_time", "timers", "config_logger_dir"), _LOGS
        ),
    },
)

DDP = Options(
    key=f"{MEGATRON}.override_ddp_config",
    megatron_name="DistributedDataParallelConfig",
    types={
        "bucket_size": int | None,
        "check_for_large_grads": bool,
        "check_for_nan_in_grad": bool,
        "grad_reduce_in_fp32": bool,
        "gradient_reduce_div_fusion": bool,
        "nccl_ub": bool,
        "disable_symmetric_registration": bool,
        "overlap_grad_reduce": bool,
        "pad_buckets_for_high_nccl_busbw": bool,
        "reduce_scatter_with_fp32_accumulation": bool,
    },
    owned={"use_distributed_optimizer": f"{MEGATRON}.use_distributed_optimizer"},
    refused={
        **dict.fromkeys(
            ("overlap_param_gather", "align_param_gather"),
            "the loss reads the output layer's weight outside its module, where Megatron-core "
            "would not wait for it",
        ),
        "average_in_collective": "losses are means over tokens, not over ranks",
        "delay_wgrad_compute": "this option requires a schedule of Megatron's own training loop",
        "num_distributed_optimizer_instances": "optimizer state is split over all data-parallel "
        "ranks",
        **dict.fromkeys(
            ("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "keep_fp8_transpose_cache"),
            _FP8,
        ),
        **dict.fromkeys(
            (
                *("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy"),
                *("suggested_communication_unit_size", "preserve_fp32_weights"),
                *("fsdp_double_buffer", "outer_dp_sharding_strategy", "fsdp_manual_registration"),
            ),
            _FSDP,
        ),
    },
)


def option_problems(actor: Actor) -> list[str]:
    """Return problems with refused fields, unknown names, wrong types and contradictions."""
    return [
        *_field_problems(OPTIMIZER, actor.optim.override_optimizer_config),
        *_field_problems(DDP, actor.megatron.override_ddp_config),
        *_precision_problems(actor),
        *_adam_problems(actor.optim.override_optimizer_config),
        *_bucket_problems(actor.megatron),
        *_offload_problems(actor.optim.override_optimizer_config),
    ]


def precision_aware(actor: Actor) -> bool:
    """Return whether either of two settings allows gradients and moments in bfloat16."""
    override = actor.optim.override_optimizer_config
    return actor.optim.use_precision_aware_optimizer or bool(
        override.get("use_precision_aware_optimizer", False)
    )


def _field_problems(options: Options, values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        found = f"{options.key}.{name}: found {shown(value)}"
        if name in options.owned:
            yield f"{found}, which has its own setting; use {options.owned[name]} instead"
        elif name in options.refused:
            yield f"{found}, but {options.refused[name]}; leave it out"
        elif name not in options.types:
            yield (
                f"{options.key}.{name}: not a field of Megatron-core 0.16.1's "
                f"{options.megatron_name}; {nearest(name, options.types)}"
            )
        elif not _fits(options.types[name], value):
            expected = {bool: "true or false", float: "a number"}.get(
                options.types[name], "an integer or null"
            )
            yield f"{found}, expected {expected}; correct it or leave it out"


def _fits(kind: Any, value: Any) -> bool:
    try:
        TypeAdapter(kind, config=_STRICT).validate_python(value)
    except ValidationError:
        return False
    return True


def _precision_problems(actor: Actor) -> Iterator[str]:
    on = f"{OPTIM}.use_precision_aware_optimizer"
    for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(actor.optim, name) != "fp32" and not precision_aware(actor):
            yield (
                f"{OPTIM}.{name}: found bf16, expected fp32 unless {on}=true; write {on}=true, "
                "or fp32"
            )
    override = f"{OPTIMIZER.key}.use_precision_aware_optimizer"
    if (
        actor.optim.use_precision_aware_optimizer
        and actor.optim.override_optimizer_config.get("use_precision_aware_optimizer") is False
    ):
        yield f"{override}: found False, but {on} is true; leave it out, or write false there"
    if not precision_aware(actor):
        return
    if actor.megatron.dtype != "bfloat16":
        yield f"{on}: found True, but {MEGATRON}.dtype is {actor.megatron.dtype}; write false"
    if not actor.megatron.use_distributed_optimizer:
        yield (
            f"{on}: found True, but {MEGATRON}.use_distributed_optimizer is false; write true "
            "there, or false here"
        )
    reduced = actor.megatron.override_ddp_config.get("grad_reduce_in_fp32")
    if reduced is not None and reduced is not (actor.optim.main_grads_dtype == "fp32"):
        yield (
            f"{DDP.key}.grad_reduce_in_fp32: found {reduced}, but {OPTIM}.main_grads_dtype="
            f"{actor.optim.main_grads_dtype} determines it with {on}; leave it out"
        )


def _adam_problems(override: Mapping[str, Any]) -> Iterator[str]:
    epsilon = override.get("adam_eps")
    if isinstance(epsilon, int | float) and not epsilon > 0:
        yield f"{OPTIMIZER.key}.adam_eps: found {epsilon}, expected a number > 0; write 1.0e-8"
    if (
        override.get("optimizer_cpu_offload") is True
        and override.get("decoupled_weight_decay") is False
    ):
        yield (
            f"{OPTIMIZER.key}.decoupled_weight_decay: found False with optimizer_cpu_offload, "
            "which Megatron-core does not support; leave one of the two out"
        )


def _bucket_problems(megatron: Megatron) -> Iterator[str]:
    """Yield problems with bucket sizes, and with gradient buffers that must not be freed."""
    override = megatron.override_ddp_config
    size = override.get("bucket_size")
    if type(size) is int and size < 1:
        yield f"{DDP.key}.bucket_size: found {size}, expected an integer >= 1 or null; leave it out"
    elif type(size) is int and override.get("overlap_grad_reduce") is not True:
        yield (
            f"{DDP.key}.bucket_size: found {size}, which has no effect without "
            "overlap_grad_reduce; write overlap_grad_reduce=true, or leave it out"
        )
    if megatron.grad_offload and override.get("nccl_ub") is True:
        yield (
            f"{MEGATRON}.grad_offload: found True with {DDP.key}.nccl_ub, whose buffers are "
            "registered with NCCL and must not be freed; leave one of the two out"
        )


def _offload_problems(override: Mapping[str, Any]) -> Iterator[str]:
    share = override.get("optimizer_offload_fraction")
    key = f"{OPTIMIZER.key}.optimizer_offload_fraction"
    if isinstance(share, int | float) and not 0 <= share <= 1:
        yield f"{key}: found {share}, expected a share from 0 to 1; write 1.0 for all the state"
    elif override.get("optimizer_cpu_offload") is True and not share:
        yield (
            f"{key}: found {shown(share)}, but optimizer_cpu_offload offloads this share of the "
            "state; write 1.0 for all of it"
        )
    elif share and override.get("optimizer_cpu_offload") is not True:
        yield (
            f"{key}: found {share} without optimizer_cpu_offload; write optimizer_cpu_offload=true"
            ", or leave it out"
        )
