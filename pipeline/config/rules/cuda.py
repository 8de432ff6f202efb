"""Settings that do nothing, or cannot be, without CUDA: refused on CPU, not ignored."""

from collections.abc import Iterator

from pipeline.config.actor import Actor
from pipeline.config.rules.megatron_options import DDP, OPTIMIZER, precision_aware
from pipeline.config.rules.rates import OPTIM
from pipeline.config.rules.transformer_rules import OVERRIDE

_IN_MEMORY = "on CPU the optimizer's state is in the host's memory already"
_ENGINE = "it is Transformer Engine's, which needs CUDA"
_OF_OPTIMIZER = {
    "optimizer_cpu_offload": _IN_MEMORY,
    "overlap_cpu_optimizer_d2h_h2d": _IN_MEMORY,
    "use_torch_optimizer_for_cpu_offload": _IN_MEMORY,
}
_OF_DDP = {
    "nccl_ub": "on CPU ranks talk by Gloo",
    "pad_buckets_for_high_nccl_busbw": "on CPU ranks talk by Gloo",
    "overlap_grad_reduce": "on CPU nothing runs beside the backward pass, and an expert without "
    "tokens has no gradient to wait for",
    "reduce_scatter_with_fp32_accumulation": "on CPU ranks talk by Gloo",
}
_OF_MODEL = {"cpu_offloading": _ENGINE, "fine_grained_activation_offloading": _ENGINE}


def cuda_problems(actor: Actor) -> Iterator[str]:
    """Yield what a run on CPU must leave out."""
    if precision_aware(actor):
        yield (
            f"{OPTIM}.use_precision_aware_optimizer: found true, but {_ENGINE}; write false, or "
            "train on GPUs"
        )
    for key, values, only in (
        (OPTIMIZER.key, actor.optim.override_optimizer_config, _OF_OPTIMIZER),
        (DDP.key, actor.megatron.override_ddp_config, _OF_DDP),
        (OVERRIDE, actor.megatron.override_transformer_config, _OF_MODEL),
    ):
        for name, why in only.items():
            if values.get(name) is True:
                yield f"{key}.{name}: found True, but {why}; leave it out, or train on GPUs"
