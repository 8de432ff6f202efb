"""Megatron's data parallelism and optimizer around model chunks."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from pipeline.config.tree import Actor


def wrap_for_training(
    chunks: Sequence[torch.nn.Module], config: Any, actor: Actor
) -> tuple[list[torch.nn.Module], Any]:
    """Chunks in DistributedDataParallel, and Megatron's optimizer over them.

    Gradients are summed in fp32 over data-parallel ranks and divided by the number of tokens that
    the loss function reports (config.calculate_per_token_loss). Weight decay leaves norms and
    biases alone, as in Megatron. The learning rate is the caller's, per param_group.
    """
    sharded = actor.megatron.use_distributed_optimizer
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=sharded
    )
    wrapped = [
        # Buckets serve the overlap of communication with the first chunk's backward pass.
        DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    optim = actor.optim
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            clip_grad=optim.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=sharded,
        ),
        wrapped,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


def parts(optimizer: Any) -> list[Any]:
    """Megatron chains one optimizer for dense and one for expert-parallel weights."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
