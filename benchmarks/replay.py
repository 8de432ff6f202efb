"""Measure the cost of replay: forward and backward passes of MoE layers, replayed and native.

    python -m benchmarks.replay [--layers N] [--tokens T] [--hidden H] [--experts E] [--ffn F]

The trainer's functions build Megatron-core's transformer layers (attention, router, dispatch,
experts). On CPU, these are Megatron's local layers in float32. With CUDA, they are Transformer
Engine's in bfloat16, with grouped GEMM and the all-to-all dispatcher. On a GPU, the default widths
are Qwen3-30B-A3B's (hidden 2048, 128 experts of 768, top-8), with 8,192 tokens. On CPU, the widths
are smaller, so that a pass takes only seconds.

The program first records a native pass. Native passes and passes that replay the recording then
take turns in one process, and the fastest pass of each kind is used. Apart from replay, both kinds
do the same work: the recorded choices are the native ones, so every expert has the same load in
both. The measured replay starts from the arrays that the trainer has laid out, so it includes
copying these arrays to the device. The rows below the ratio give the time of each part of a
replayed pass, as measured with PyTorch's profiler. On CPU, seconds are processor seconds, which
exclude other programs. On a GPU, they are wall-clock seconds.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure import machine
from benchmarks.page import Table, arguments_of, block, publish, verdict
from operators.cpu import without_cuda
from operators.cpu.layers import local_block_spec
from operators.training.batches.micro_batch import REPLAYED
from operators.training.megatron import parallel
from operators.training.replay.hooks import Recorder, Replayer, bound
from operators.training.replay.replayed import ReplayedRows
from pipeline.config.actor import Megatron
from pipeline.config.rules.cuda import chosen

GOAL = 1.01
TOPK = 8


@dataclass(frozen=True)
class Shape:
    """Sizes of the stack. Example: Shape(2, 1024, 1024, 64, 384)."""

    layers: int
    tokens: int
    hidden: int
    experts: int
    ffn: int
    fused: bool = True
    """Whether tokens are permuted by fused kernels, as in training on GPUs."""


ON_CPU = Shape(layers=2, tokens=512, hidden=1024, experts=64, ffn=384)
ON_GPU = Shape(layers=4, tokens=8192, hidden=2048, experts=128, ffn=768)


@dataclass(frozen=True)
class Found:
    """Measurements of forward and backward passes, in seconds."""

    native_s: tuple[float, ...]
    replayed_s: tuple[float, ...]
    object_s: float
    """Seconds that a replayed pass spends in the replay objects, including the router's top-k; on a
    GPU, only the CPU's time in them."""
    same_output: bool
    """Whether both passes gave the same bits, as expected with routes from the same weights."""
    parts: tuple[tuple[str, float], ...]
    """Names and seconds of the parts of a replayed pass, first forward, then backward."""

    @property
    def ratio(self) -> float:
        """Time of the fastest replayed pass, relative to the fastest native pass."""
        return min(self.replayed_s) / min(self.native_s)


def config_of(shape: Shape) -> TransformerConfig:
    """Return the configuration of a stack of layers like Qwen3-MoE's."""
    on_gpu = not without_cuda.ON_CPU
    settings: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": max(1, shape.hidden // 64),
        "num_query_groups": max(1, shape.hidden // 512),
        "kv_channels": 64,
        "ffn_hidden_size": shape.ffn,
        "moe_ffn_hidden_size": shape.ffn,
        "num_moe_experts": shape.experts,
        "moe_router_topk": TOPK,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": on_gpu,
        "params_dtype": torch.bfloat16 if on_gpu else torch.float32,
    }
    if not on_gpu:
        settings |= without_cuda.SETTINGS
    elif shape.fused:
        settings |= chosen(latent=False)
    return TransformerConfig(**settings)


def stack_of(config: TransformerConfig) -> TransformerBlock:
    """Build the layers in training mode; the process must be the only rank of its group."""
    if without_cuda.ON_CPU:
        spec = local_block_spec(config, None)
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, normalization="RMSNorm"
        )
    torch.manual_seed(0)
    block = TransformerBlock(config, spec, pre_process=True, post_process=True)
    return block if without_cuda.ON_CPU else block.cuda()


class Timed:
    """Wrapper around a replay object that adds up the time spent in that object."""

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self.seconds = 0.0

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, groups: Any, group_topk: Any, native: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement Megatron's hook, and name the router's top-k for the profiler.

        Native routing also computes that top-k.

        Args:
            scores: The router's scores [R, E].
            topk: K.
            groups: Number of groups of experts; None if experts are not grouped.
            group_topk: Number of groups to select; None if experts are not grouped.
            native: Megatron's top-k.

        Returns:
            Scores and ids of the chosen experts, [R, K] each.
        """
        started = _clock()
        native = _named("router: top-k", native)
        with record_function("replay object"):
            found = self._replayer.get_replay_topk(scores, topk, groups, group_topk, native)
        self.seconds += _clock() - started
        return found

    def finish(self, forward_only: bool) -> None:
        """Check that the pass used all routes."""
        self._replayer.finish(forward_only)


def measure(shape: Shape, repetitions: int) -> Found:
    """Measure a stack in this process, which must not be in a process group yet."""
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    parallel.start(Megatron())
    try:
        return _measure(shape, repetitions)
    finally:
        parallel.leave()


def _measure(shape: Shape, repetitions: int) -> Found:
    config = config_of(shape)
    block = stack_of(config)
    device = next(block.parameters()).device
    routers = {i: layer.mlp.router for i, layer in enumerate(block.layers)}
    hidden_NBH = torch.randn(
        shape.tokens, 1, shape.hidden, device=device, dtype=config.params_dtype
    ).requires_grad_()

    def passed(objects: dict[int, Any]) -> tuple[float, torch.Tensor]:
        """Run a forward and backward pass; return its seconds and the output."""
        block.zero_grad(set_to_none=True)
        _wait(device)
        started = _clock()
        with bound(routers, objects, forward_only=False) if objects else nullcontext():
            output_NBH = block(hidden_NBH, None)
            output_NBH.float().square().mean().backward()
        _wait(device)
        return _clock() - started, output_NBH.detach()

    recorders = {
        i: Recorder(i, 1, torch.uint8 if shape.experts <= 256 else torch.uint16) for i in routers
    }
    passed(recorders)
    sets = {i: recorder.sets_RK[0].cpu().numpy() for i, recorder in recorders.items()}

    def replayers() -> dict[int, Replayer]:
        kinds_R = np.full(shape.tokens, REPLAYED, np.uint8)
        sets_LRK = np.stack(list(sets.values()))
        rows = [ReplayedRows(kinds_R, sets_LRK, list(sets), shape.experts, device)]
        return {n: Replayer(n, i, shape.experts, rows) for i, n in enumerate(sets)}

    native, replayed, inside = [], [], []
    outputs: dict[bool, torch.Tensor] = {}
    passed({})
    passed(dict(replayers()))
    for repetition in range(repetitions):
        # Native and replayed passes take turns at going first, so that caches and clocks favour
        # neither.
        for with_replay in (True, False) if repetition % 2 else (False, True):
            timed = {i: Timed(replayer) for i, replayer in replayers().items()}
            seconds, outputs[with_replay] = passed(dict(timed) if with_replay else {})
            (replayed if with_replay else native).append(seconds)
            if with_replay:
                inside.append(sum(one.seconds for one in timed.values()))
    parts = _parts(block, lambda: passed({i: Timed(one) for i, one in replayers().items()}))
    return Found(
        tuple(native),
        tuple(replayed),
        statistics.median(inside),
        torch.equal(outputs[True], outputs[False]),
        parts,
    )


def _parts(block: TransformerBlock, replay: Callable[[], Any]) -> tuple[tuple[str, float], ...]:
    """Profile one replayed pass. The modules remain wrapped, so do not time them afterwards."""
    for layer in block.layers:
        moe, attention = layer.mlp, layer.self_attention
        attention.forward = _named("attention", attention.forward)
        moe.router.gating = _named("router: matmul", moe.router.gating)
        moe.router.routing = _named("routing", moe.router.routing)
        moe.routed_experts_compute = _named("experts", moe.routed_experts_compute)
        for step in ("preprocess", "dispatch", "combine"):
            setattr(moe, step, _named("dispatch and combine", getattr(moe, step)))
        for step in ("dispatch_postprocess", "combine_preprocess"):
            work = getattr(moe.token_dispatcher, step)
            setattr(moe.token_dispatcher, step, _named("permute", work))
    on_gpu = not without_cuda.ON_CPU
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiled:
        seconds, _ = replay()
    spent: dict[str, float] = {}
    for event in profiled.key_averages():
        taken = event.device_time_total if on_gpu else event.cpu_time_total
        spent[event.key] = max(spent.get(event.key, 0.0), taken / 1e6)
    spent["experts"] -= spent["permute"]
    named = ("attention", "router: matmul", "router: top-k", "dispatch and combine", "permute")
    parts = [(name, spent[name]) for name in (*named, "experts")]
    parts.append(("router: rest", spent["routing"] - spent["replay object"]))
    parts.append(("replay: upload, order, gather", spent["replay object"] - spent["router: top-k"]))
    rest = seconds - sum(part for _, part in parts)
    return (*parts, ("backward and unnamed operations", rest))


def _named(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def named(*arguments: Any, **named_arguments: Any) -> Any:
        with record_function(name):
            return work(*arguments, **named_arguments)

    return named


def _clock() -> float:
    return time.process_time() if without_cuda.ON_CPU else time.perf_counter()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table_of(found: Found) -> Table:
    """Return the table of the ratio and the time of each part of a replayed pass."""
    native, replayed = min(found.native_s), min(found.replayed_s)
    share = found.object_s / replayed
    rows = [
        ("native forward and backward", f"{1e3 * native:,.2f}", ""),
        ("replayed forward and backward", f"{1e3 * replayed:,.2f}", ""),
        (f"ratio, goal <= {GOAL}: {verdict(found.ratio <= GOAL)}", f"{found.ratio:.4f}", ""),
        ("same bits in the output", "yes" if found.same_output else "no", ""),
        ("in the replay objects", f"{1e3 * found.object_s:,.2f}", f"{100 * share:.2f}%"),
    ]
    whole = sum(part for _, part in found.parts)
    for name, part in found.parts:
        rows.append((f"profiled: {name}", f"{1e3 * part:,.2f}", f"{100 * part / whole:.2f}%"))
    return Table(("", "ms", "of the replayed pass"), tuple(rows))


def main() -> None:
    default = ON_CPU if without_cuda.ON_CPU else ON_GPU
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, value in vars(default).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = arguments_of(parser)
    shape = Shape(**{name: getattr(arguments, name) for name in vars(default)})
    repetitions = arguments.repetitions
    if arguments.quick:
        shape, repetitions = Shape(layers=1, tokens=32, hidden=64, experts=8, ffn=16), 1
    found = measure(shape, repetitions)
    where = machine("torch", "megatron-core")
    if not without_cuda.ON_CPU:
        where = f"{torch.cuda.get_device_name()}; {where}"
    seconds = "processor seconds" if without_cuda.ON_CPU else "seconds by the clock"
    title = (
        f"{shape.layers} layers, hidden {shape.hidden}, {shape.experts} experts of {shape.ffn}, "
        f"top-{TOPK}, {shape.tokens} tokens, threads: {torch.get_num_threads()}, {seconds}:"
    )
    publish({"replay": block(title, table_of(found), where)}, arguments)


if __name__ == "__main__":
    main()
