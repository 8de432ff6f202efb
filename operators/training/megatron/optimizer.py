"""Wraps model chunks in Megatron's data parallelism, and creates and steps its optimizer."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from operators.cpu import without_cuda
from pipeline.config.actor import Actor
from pipeline.config.optim import Optim
from pipeline.config.rules.cuda import cuda_problems
from pipeline.config.rules.overrides import DDP, OPTIMIZER, unknown_fields
from pipeline.config.rules.precision import option_problems, precision_aware
from pipeline.config.rules.rates import OPTIM
from pipeline.errors import InputError

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
}


def wrap_for_training(
    chunks: Sequence[torch.nn.Module], config: TransformerConfig, actor: Actor
) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    """Wrap chunks in DistributedDataParallel, and create Megatron's optimizer for them.

    Gradients are summed over data-parallel ranks, by default in fp32, and divided by the number of
    tokens that the loss function reports (config.calculate_per_token_loss). `Rates` sets the
    learning rate and weight decay of the parameter groups before each update.

    Args:
        chunks: The model's chunks on this rank.
        config: The model's config, which receives the hooks for Megatron's schedules.
        actor: Settings of the actor, or of the critic in the same form.

    Raises:
        InputError: Megatron-core refuses an option, or this device does not support it.
    """
    problems = [
        *option_problems(actor),
        *unknown_fields(OPTIMIZER, OptimizerConfig, actor.optim.override_optimizer_config),
        *unknown_fields(DDP, DistributedDataParallelConfig, actor.megatron.override_ddp_config),
    ]
    if without_cuda.ON_CPU:
        problems += cuda_problems(actor)
    if problems:
        raise InputError(problems)
    settings = ddp_config(actor)
    wrapped = [
        # Buckets let communication overlap with the backward pass of the same chunk. Only the first
        # chunk needs them: its backward pass runs last, whereas the communication of the other
        # chunks overlaps with the backward passes that follow.
        DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    optimizer = get_megatron_optimizer(optimizer_config(actor), wrapped)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if settings.overlap_grad_reduce:
        # Only the last micro-batch's backward pass sends gradients.
        pauses = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    return wrapped, optimizer


def ddp_config(actor: Actor) -> DistributedDataParallelConfig:
    """Return Megatron's options for data parallelism."""
    in_fp32 = not (precision_aware(actor) and actor.optim.main_grads_dtype == "bf16")
    return DistributedDataParallelConfig(
        **{
            "grad_reduce_in_fp32": in_fp32,
            "use_distributed_optimizer": actor.megatron.use_distributed_optimizer,
            **actor.megatron.override_ddp_config,
        }
    )


def optimizer_config(actor: Actor) -> OptimizerConfig:
    """Return Megatron's options for the optimizer.

    Raises InputError for options that Megatron-core refuses.
    """
    optim = actor.optim
    options: dict[str, Any] = {
        "optimizer": "adam",
        "lr": optim.lr,
        "min_lr": optim.min_lr,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "clip_grad": optim.clip_grad,
        "bf16": actor.megatron.dtype == "bfloat16",
        "params_dtype": _DTYPES[actor.megatron.dtype],
        "use_distributed_optimizer": actor.megatron.use_distributed_optimizer,
        **optim.override_optimizer_config,
    }
    if precision_aware(actor):
        options |= {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": _DTYPES[optim.main_grads_dtype],
            "exp_avg_dtype": _DTYPES[optim.exp_avg_dtype],
            "exp_avg_sq_dtype": _DTYPES[optim.exp_avg_sq_dtype],
        }
    try:
        return OptimizerConfig(**options)
    except (AssertionError, RuntimeError) as error:
        raise InputError([f"{OPTIM}: Megatron-core refuses the options: {error}"]) from error


@dataclass(frozen=True)
class Rates:
    """Each step's learning rate and weight decay, from Megatron-core's OptimizerParamScheduler.

    Both are pure functions of the settings and the step, so checkpoints do not store them.
    """

    scheduler: OptimizerParamScheduler
    on_norms: bool
    """Whether weight decay also applies to norms and biases."""

    def set(self, step: int) -> float:
        """Set the rates of all parameter groups for a step (from 0); return the learning rate.

        Megatron puts one-dimensional parameters (norms, biases) into separate groups. The
        scheduler multiplies the decay of these groups by 0, although the optimizer itself would
        decay them.
        """
        self.scheduler.num_steps = step
        self.scheduler.step(0)
        if self.on_norms:
            for group in self.scheduler.optimizer.param_groups:
                group["weight_decay"] = self.scheduler.get_wd()
        return self.scheduler.get_lr({})


def make_rates(optimizer: MegatronOptimizer, optim: Optim) -> Rates:
    """Create the schedule; unless the rate is constant, lr_decay_steps must already be resolved."""
    horizon = optim.lr_decay_steps
    if horizon is None or optim.lr_decay_style == "constant":
        # Megatron asserts that the decay ends after the warm-up; the value has no other effect.
        horizon = optim.lr_warmup_steps + 1
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=optim.lr_warmup_init,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_decay_steps=horizon,
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=optim.lr_wsd_decay_steps,
        lr_wsd_decay_style=optim.lr_wsd_decay_style,
    )
    return Rates(scheduler, optim.weight_decay_on_norms)


def checked_step(optimizer: MegatronOptimizer) -> tuple[bool, float]:
    """Step if the gradients are finite; return whether a step was taken, and the gradient norm.

    Megatron itself would also step with non-finite gradients if no loss scale is used, and without
    clipping it would not compute the norm. The norm is summed over all ranks that hold a part of
    the model, so all ranks make the same decision.
    """
    overflow = optimizer.prepare_grads()
    norm = optimizer.get_grad_norm()
    if overflow or not math.isfinite(norm):
        return False, float(norm)
    with _prepared(optimizer, norm):
        done, _, _ = optimizer.step()
    return done, float(norm)


@contextlib.contextmanager
def _prepared(optimizer: Any, norm: Any) -> Iterator[None]:
    """Let Megatron's `step` use the unchanged gradients and this norm.

    It would otherwise copy all gradients again, and reduce their norm over all ranks again.
    """
    optimizer.prepare_grads = lambda: False
    optimizer.get_grad_norm = lambda: norm
    try:
        yield
    finally:
        del optimizer.prepare_grads, optimizer.get_grad_norm


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the chained optimizers: Megatron has one for dense and one for expert weights."""
    if isinstance(optimizer, ChainedOptimizer):
        return list(optimizer.chained_optimizers)
    return [optimizer]
