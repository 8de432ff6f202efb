"""Rules for the optimizer's precision and for related options of Megatron-core."""

from collections.abc import Iterator

from pipeline.config.actor import Actor
from pipeline.config.rules.overrides import DDP, MEGATRON, OPTIMIZER, refused_fields
from pipeline.config.rules.rates import OPTIM
from pipeline.errors import shown

_ON = f"{OPTIM}.use_precision_aware_optimizer"


def precision_aware(actor: Actor) -> bool:
    """Return whether either of two settings allows gradients and moments in bfloat16."""
    override = actor.optim.override_optimizer_config
    return actor.optim.use_precision_aware_optimizer or bool(
        override.get("use_precision_aware_optimizer", False)
    )


def option_problems(actor: Actor) -> list[str]:
    """Return problems with the options of the optimizer and of data parallelism."""
    return [
        *refused_fields(OPTIMIZER, actor.optim.override_optimizer_config),
        *refused_fields(DDP, actor.megatron.override_ddp_config),
        *_precision_problems(actor),
        *_option_problems(actor),
    ]


def _precision_problems(actor: Actor) -> Iterator[str]:
    optim, override = actor.optim, actor.optim.override_optimizer_config
    if not precision_aware(actor):
        # Megatron-core would not read these settings.
        for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(optim, name) != "fp32":
                yield (
                    f"{OPTIM}.{name}: found bf16, expected fp32 unless {_ON}=true; write {_ON}="
                    "true, or fp32"
                )
        return
    if override.get("use_precision_aware_optimizer") is False:
        yield (
            f"{OPTIMIZER.key}.use_precision_aware_optimizer: found False, but {_ON} is true; leave "
            "it out, or write false there"
        )
    if actor.megatron.dtype != "bfloat16":
        yield f"{_ON}: found True, but {MEGATRON}.dtype is {actor.megatron.dtype}; write false"
    if not actor.megatron.use_distributed_optimizer:
        yield (
            f"{_ON}: found True, but {MEGATRON}.use_distributed_optimizer is false; write true "
            "there, or false here"
        )
    reduced = actor.megatron.override_ddp_config.get("grad_reduce_in_fp32")
    if reduced is not None and reduced is not (optim.main_grads_dtype == "fp32"):
        yield (
            f"{DDP.key}.grad_reduce_in_fp32: found {reduced}, but {OPTIM}.main_grads_dtype="
            f"{optim.main_grads_dtype} determines it with {_ON}; leave it out"
        )


def _option_problems(actor: Actor) -> Iterator[str]:
    override, megatron = actor.optim.override_optimizer_config, actor.megatron
    epsilon, share = override.get("adam_eps"), override.get("optimizer_offload_fraction")
    if isinstance(epsilon, int | float) and not epsilon > 0:
        yield f"{OPTIMIZER.key}.adam_eps: found {epsilon}, expected a number > 0; write 1.0e-8"
    if isinstance(share, int | float) and not 0 <= share <= 1:
        yield (
            f"{OPTIMIZER.key}.optimizer_offload_fraction: found {share}, expected a share from 0 "
            "to 1; write 1.0 for all the state"
        )
    elif override.get("optimizer_cpu_offload") is True and not share:
        yield (
            f"{OPTIMIZER.key}.optimizer_offload_fraction: found {shown(share)}, but "
            "optimizer_cpu_offload offloads this share of the state; write 1.0 for all of it"
        )
    if (
        override.get("optimizer_cpu_offload") is True
        and override.get("decoupled_weight_decay") is False
    ):
        yield (
            f"{OPTIMIZER.key}.decoupled_weight_decay: found False with optimizer_cpu_offload, "
            "which Megatron-core does not support; leave one of the two out"
        )
    if megatron.grad_offload and megatron.override_ddp_config.get("nccl_ub") is True:
        yield (
            f"{MEGATRON}.grad_offload: found True with {DDP.key}.nccl_ub, whose buffers are "
            "registered with NCCL and must not be freed; leave one of the two out"
        )
