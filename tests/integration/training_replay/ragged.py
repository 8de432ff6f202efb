"""Samples of 1 to 600 positions on two context-parallel ranks, and on two data-parallel ones."""

import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from operators.training.batches.layout import make_layout
from operators.training.batches.step_data import layout_rules
from operators.training.megatron import parallel
from operators.training.passes.compared import Compared
from operators.training.passes.logprob_pass import LogProbs, native_pass
from operators.training.passes.update import gradients
from operators.training.rank import make_rank
from pipeline.traces import Sample, VersionSpan
from tests.integration.training_replay.sealed import VOCABULARY, config_of

LENGTHS = (1, 2, 3, 4, 5, 8, 33, 64, 150, 257, 599, 600)
"""S - 1 of each sample."""


def compared(model: Path) -> dict[str, dict[str, float]]:
    """By context-parallel layout, how far it is from data parallelism: log-probs, and gradients
    relative to the largest of each tensor. Both sum over the same samples."""
    expected = results(model, {})
    found = {}
    for name, packed in (("packed", True), ("padded", False)):
        made = results(model, {"context_parallel_size": 2, "use_remove_padding": packed})
        assert made.keys() == expected.keys()
        differences = dict.fromkeys(("logprobs", "gradient"), 0.0)
        for key, theirs in expected.items():
            what, difference = key.split(":")[0], np.abs(made[key] - theirs).max(initial=0)
            if what == "gradient":
                difference /= max(np.abs(theirs).max(), 1e-3)
            differences[what] = max(differences[what], float(difference))
        found[name] = differences | {"tensors": len(expected)}
    return found


def results(model: Path, megatron: dict[str, Any]) -> dict[str, np.ndarray]:
    """Log-probs by sample and gradients by parameter of a step of one mini-batch, on every rank."""
    config = config_of(
        megatron={"use_distributed_optimizer": False, **megatron}, ppo_mini_batch_size=len(LENGTHS)
    )
    position = parallel.start(config.actor_rollout_ref.actor.megatron)
    rank, _ = make_rank(config, position, model)
    data = ragged_data(layout_rules(config, position.data_parallel))
    made = native_pass(rank, data, rank.chunks)
    (mini_batch,) = data.layout.mini_batches
    gradients(rank, data, mini_batch, compared_of(data, made.logprobs), None)
    (chunk,) = rank.chunks
    found = {f"gradient:{n}": p.main_grad.clone().numpy() for n, p in chunk.named_parameters()}
    parts: list[dict[str, np.ndarray]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, made.logprobs)
    for part in parts:
        found |= {f"logprobs:{id}": values for id, values in part.items()}
    assert len(found) > len(LENGTHS) + 50
    parallel.stop()
    return found


def compared_of(data: Any, old: LogProbs) -> Compared:
    """Advantages of -1, 0 and 1, of the samples that the last stage has log-probs of."""
    samples = {id: data.samples[id] for id in old}
    signs = {id: float(i % 3 - 1) for i, id in enumerate(data.samples)}
    return Compared(
        old,
        None,
        advantages={
            id: np.full(len(sample.response_tokens_G), signs[id], np.float32)
            for id, sample in samples.items()
        },
        mask={id: sample.loss_mask_G for id, sample in samples.items()},
    )


def ragged_data(rules: Any) -> Any:
    """The parts of StepData that passes need, without a store.

    The log-prob pass has other micro-batches than the update: padded ones cut samples elsewhere.
    """
    rng = np.random.default_rng(0)
    samples = {f"000000/{i}/0": _sample(f"000000/{i}/0", T, rng) for i, T in enumerate(LENGTHS)}
    layout, of_logprobs = (
        make_layout(0, np.arange(len(LENGTHS)), np.array(LENGTHS), each)
        for each in (rules, replace(rules, micro_batch_samples=3))
    )
    return types.SimpleNamespace(
        samples=samples,
        ids=dict(enumerate(samples)),
        untrained=frozenset(),
        layout=layout,
        logprob_layout=of_logprobs,
        reference_layout=None,
    )


def _sample(id: str, positions: int, rng: np.random.Generator) -> Sample:
    tokens = rng.integers(3, VOCABULARY, positions + 1).astype(np.uint32)
    P = int(rng.integers(1, positions + 1))
    G = len(tokens) - P
    return Sample(
        id=id,
        group=id.rpartition("/")[0],
        prompt_id=id,
        prompt_tokens_P=tokens[:P],
        response_tokens_G=tokens[P:],
        loss_mask_G=rng.random(G) < 0.9,
        logprobs_G=rng.normal(-6, 0.1, G).astype(np.float32),
        finish_reason="stop",
        version_spans=(VersionSpan(0, 0, G),),
        seed=0,
        reward=0.0,
        reward_error=None,
        extras={},
        routes=None,
    )
