"""Measure the gain from packing in training, and the memory that the loss needs.

    python -m benchmarks.training

The example model is trained on samples whose lengths have a long tail. The lengths are lognormal
with a mean of 2,048 tokens and a maximum of 10,240 tokens, divided by `--scale` so that a CPU needs
only a minute. On a GPU, the lengths are not divided, and the model has half a billion random
weights. With less work, a GPU would spend its time starting kernels, whose number does not depend
on padding. Packed and padded micro-batches contain the same samples and take turns in one process.
The trainer's functions compute the layout and the passes: a native log-prob pass, and the gradients
of every mini-batch. Seconds are processor seconds. On a GPU, where Transformer Engine computes in
bfloat16, they are wall-clock seconds.

The peak is the maximum memory of tensors during these passes, excluding the model, gradients and
optimizer. The memory of the loss is the maximum memory of tensors while the loss of one micro-batch
is computed, excluding the hidden states and the output layer's weight. Its unit is the size of the
float32 logits of all tokens in the micro-batch. The memory of the loss is measured only on CPU,
with PyTorch's profiler.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import machine, typical
from benchmarks.page import Table, arguments_of, block, publish, verdict
from operators.cpu import without_cuda
from operators.training.batches.layout import Layout, make_layout
from operators.training.batches.step_data import layout_rules
from operators.training.megatron import parallel
from operators.training.passes.compared import Compared
from operators.training.passes.logprob_pass import native_pass
from operators.training.passes.logprobs import CHUNK_TOKENS, logprobs_and_entropy
from operators.training.passes.update import gradients
from operators.training.rank import Rank, make_rank
from pipeline.config.tree import RunConfig
from pipeline.traces import Sample, new_sample

MODEL = Path("examples/addition/model")
DTYPE = "float32" if without_cuda.ON_CPU else "bfloat16"
WIDTHS = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Sizes of the model that is trained on a GPU."""
MEAN, MOST, SIGMA = 2_048, 10_240, 1.0
PROMPT = 8
VOCABULARY = 320
FEWER, FASTER = 3.0, 2.0
"""Goals: the factors by which padding must decrease and tokens per second must increase."""
MOST_CHUNKS = 1.5
LONGEST, SORTED, PACKED = WAYS = (
    "padded to the longest of the mini-batch (for pipeline stages)",
    "padded, samples sorted by length",
    "packed",
)


@dataclass(frozen=True)
class Found:
    """Measurements of one way to form micro-batches."""

    padding: int
    """Positions without a token in a pass over all samples."""
    seconds: float
    peak: int
    """Peak size of the tensors in bytes, excluding those that existed before the passes."""


def lengths_of(samples: int, scale: int) -> np.ndarray:
    """Draw token counts with a long tail, divided by `scale`: int64 [samples]."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, samples)
    return np.clip(drawn, 4 * PROMPT * scale, MOST).astype(np.int64) // scale


def make_samples(lengths: np.ndarray) -> dict[str, Sample]:
    """Return samples of random tokens, one for each length, keyed by id."""
    rng = np.random.default_rng(1)
    made = {}
    for i, length in enumerate(lengths.tolist()):
        G = length - PROMPT
        prompt_P, response_G = (rng.integers(0, VOCABULARY, n) for n in (PROMPT, G))
        logprobs_G = np.full(G, -5)
        sample = new_sample(0, str(i), 0, prompt_P, response_G, logprobs=logprobs_G, reward=1.0)
        made[sample.id] = sample
    return made


def config(packed: bool, samples: int, budget: int) -> RunConfig:
    """Return the settings of a run whose steps have one mini-batch.

    Args:
        packed: Whether to pack micro-batches; otherwise each has 8 padded samples.
        samples: Number of samples in the mini-batch.
        budget: Token budget of a pack.
    """
    actor: dict[str, Any] = {
        "ppo_mini_batch_size": samples,
        "ppo_micro_batch_size_per_gpu": 8,
        "megatron": {"dtype": DTYPE, "use_remove_padding": packed},
    }
    if packed:
        actor |= {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": budget}
    return RunConfig.model_validate(
        {
            "data": {"train_files": "t.parquet", "train_batch_size": samples},
            "actor_rollout_ref": {"model": {"path": str(MODEL)}, "actor": actor},
            "trainer": {"experiment_name": "x", "total_training_steps": 1},
        }
    )


def model_in(folder: Path) -> Path:
    """Return the model's folder: on CPU the example model; on a GPU, write a wider model first."""
    if without_cuda.ON_CPU:
        return MODEL
    from tests.tiny_models import make_tiny

    return make_tiny(folder, "qwen3_moe", dtype=torch.bfloat16, **WIDTHS)


def seconds_of(work: Callable[[], None]) -> float:
    """Return the median seconds of three calls."""
    if without_cuda.ON_CPU:
        return typical(work, 3, limit_s=120)[0]
    taken = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def trained(rank: Rank, data: Any) -> None:
    """Run a log-prob pass and compute all gradients for a step."""
    made = native_pass(rank, data, rank.chunks)
    compared = Compared(
        made.logprobs,
        None,
        advantages={id: np.ones_like(old_G) for id, old_G in made.logprobs.items()},
        mask={id: data.samples[id].loss_mask_G for id in made.logprobs},
    )
    for mini_batch in data.layout.mini_batches:
        gradients(rank, data, mini_batch, compared, None)


def measure(
    model: Path, samples: dict[str, Sample], lengths: np.ndarray, way: str, budget: int
) -> Found:
    """Train once to fill the caches, then measure.

    Args:
        model: Folder of the model.
        samples: Samples by id.
        lengths: Number of tokens of each sample.
        way: One of WAYS.
        budget: Token budget of a pack.
    """
    settings = config(way == PACKED, len(samples), budget)
    position = parallel.start(settings.actor_rollout_ref.actor.megatron)
    rank, _ = make_rank(settings, position, model)
    groups = np.arange(len(samples))
    rules = layout_rules(settings, 1)
    if way == LONGEST:
        rules = replace(rules, same_shape="all")
    layout = make_layout(0, groups, lengths - 1, rules)
    data = SimpleNamespace(
        layout=layout,
        layouts={"update": layout, "log_prob": layout},
        ids=dict(enumerate(samples)),
        samples=samples,
        untrained=frozenset(),
        step=0,
    )
    trained(rank, data)
    seconds = seconds_of(lambda: trained(rank, data))
    peak = peak_of(lambda: trained(rank, data))
    parallel.stop()
    return Found(positions(layout) - int((lengths - 1).sum()), seconds, peak)


def positions(layout: Layout) -> int:
    """Return the number of positions that a pass over all samples computes."""
    return sum(
        int(np.prod(micro.shape))
        for mini_batch in layout.epoch(0)
        for micro in mini_batch.shares[0]
    )


def peak_of(work: Callable[[], object]) -> int:
    """Return the peak size in bytes of the tensors that some work creates."""
    if not without_cuda.ON_CPU:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def loss_memory(tokens: int, vocabulary: int, whole: bool, training: bool) -> float:
    """Measure the peak memory of a loss.

    Args:
        tokens: Tokens of the micro-batch.
        vocabulary: Size of the vocabulary.
        whole: Whether to compute all tokens together in plain torch, instead of in chunks.
        training: Whether to compute gradients.

    Returns:
        Peak size of the tensors, divided by the size of all float32 logits.
    """
    hidden_TH = torch.randn(tokens, 64).requires_grad_(training)
    weight_VH = torch.randn(vocabulary, 64).requires_grad_(training)
    labels_T = torch.randint(0, vocabulary, (tokens,))
    alone = dist.new_group()

    def loss() -> None:
        if whole:  # as in a framework without chunks
            log_p = (hidden_TH @ weight_VH.T / 0.9).log_softmax(-1)
            logp_T = log_p.gather(-1, labels_T[:, None])[:, 0]
            entropy_T = -(log_p.exp() * log_p).sum(-1)
        else:
            logp_T, entropy_T = logprobs_and_entropy(
                hidden_TH, weight_VH, labels_T, 0.9, alone, entropy_gradient=training
            )
        if training:
            torch.autograd.backward((logp_T + entropy_T).sum())

    own = 4 * (hidden_TH.numel() + 2 * weight_VH.numel()) if training else 0  # gradients
    return (peak_of(loss) - own) / (4 * tokens * vocabulary)


def main() -> None:
    """Measure packing and the loss, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=64)
    scale = 16 if without_cuda.ON_CPU else 1
    parser.add_argument("--scale", type=int, default=scale, help="divisor for all lengths")
    arguments = arguments_of(parser)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    count = 8 if arguments.quick else arguments.samples
    lengths = lengths_of(count, arguments.scale)
    samples = make_samples(lengths)
    tokens = int((lengths - 1).sum())
    budget = 2 * MOST // arguments.scale
    with tempfile.TemporaryDirectory() as folder:
        model = model_in(Path(folder))
        found = {way: measure(model, samples, lengths, way, budget) for way in WAYS}
    rows = tuple(
        (
            way,
            f"{one.padding:,}",
            f"{one.padding / tokens:.0%}",
            f"{tokens / one.seconds:,.0f}",
            f"{found[LONGEST].seconds / one.seconds:.2f}x",
            f"{one.peak / 1e6:,.0f} MB",
        )
        for way, one in found.items()
    )
    unit = "CPU second" if without_cuda.ON_CPU else "second"
    headers = (
        "micro-batches",
        "padding positions",
        "of tokens",
        f"tokens per {unit}",
        "",
        "peak",
    )
    fewer = found[LONGEST].padding / max(1, found[PACKED].padding)
    faster = found[LONGEST].seconds / found[PACKED].seconds
    limits = Table(
        ("packed, relative to padded to the longest", "limit", "found", ""),
        (
            (
                "fewer padding positions",
                f">= {FEWER}x",
                f"{fewer:.0f}x",
                verdict(fewer >= FEWER),
            ),
            ("tokens per second", f">= {FASTER}x", f"{faster:.1f}x", verdict(faster >= FASTER)),
        ),
    )
    title = (
        f"{count} samples, {tokens:,} tokens, mean {lengths.mean():.0f}, longest {lengths.max()}; "
        f"packs of at most {budget:,}, padded micro-batches of 8:"
    )
    tables: list[Table | str] = [title, Table(headers, rows), limits]
    if without_cuda.ON_CPU:
        tables.append(memory_table(arguments.quick))
    publish({"training": block(*tables, machine("torch", "megatron-core"))}, arguments)
    dist.destroy_process_group()


def memory_table(quick: bool) -> Table:
    """Return the table of the loss's memory, with and without chunks and gradients."""
    few = (512, 4_000) if quick else (8 * CHUNK_TOKENS, 8_000)
    limit = MOST_CHUNKS * CHUNK_TOKENS / few[0]
    rows = []
    for training, what in ((True, "forward and backward"), (False, "forward only")):
        whole, chunked = (loss_memory(*few, whole, training) for whole in (True, False))
        rows += [
            (f"{what}, all tokens together, plain torch", f"{whole:.2f}", "", ""),
            (
                f"{what}, {few[0]:,} tokens, {CHUNK_TOKENS:,} at a time",
                f"{chunked:.2f}",
                f"<= {limit:.2f}",
                verdict(chunked <= limit),
            ),
        ]
    return Table(("loss", "x float32 logits of all tokens", "limit", ""), tuple(rows))


if __name__ == "__main__":
    main()
