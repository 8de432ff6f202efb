"""Megatron's data parallelism and optimizer around model chunks."""

from collections.abc import Sequence

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
from megatron.core.transformer import TransformerConfig

from pipeline.config.actor import Actor


def wrap_for_training(
    chunks: Sequence[torch.nn.Module], config: TransformerConfig, actor: Actor
) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    """Wrap chunks in DistributedDataParallel, and make Megatron's optimizer for them.

    Gradients are summed in fp32 over data-parallel ranks and divided by the number of tokens that
    the loss function reports (config.calculate_per_token_loss). Weight decay excludes norms and
    biases, as in Megatron. The caller sets the learning rate, per param_group.
    """
    sharded = actor.megatron.use_distributed_optimizer
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=sharded
    )
    wrapped = [
        # Buckets overlap communication with the first chunk's backward pass.
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


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The single optimizers: Megatron chains one for dense and one for expert-parallel weights."""
    if isinstance(optimizer, ChainedOptimizer):
        return list(optimizer.chained_optimizers)
    return [optimizer]
