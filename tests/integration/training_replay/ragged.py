"""Passes over samples of 1 to 600 positions, in any layout."""

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
from operators.training.passes.logprob_pass import LogProbs, recording_pass, replaying_pass
from operators.training.passes.update import gradients
from operators.training.rank import Rank, make_rank
from pipeline.traces import Sample, VersionSpan
from tests.integration.training_replay.sealed import VOCABULARY, config_of

LENGTHS = (1, 2, 3, 4, 5, 8, 33, 64, 150, 257, 599, 600)
"""The number of rows (S - 1) of each sample."""


def compared(model: Path) -> dict[str, dict[str, float]]:
    """Return the largest differences between context and data parallelism, keyed by layout.

    Both layouts sum over the same samples. See `differences` for the values.
    """
    expected, _ = results(model, {})
    found = {}
    for name, packed in (("packed", True), ("padded", False)):
        made, _ = results(model, {"context_parallel_size": 2, "use_remove_padding": packed})
        found[name] = differences(made, expected)
    return found


def packed_against_padded(
    model: Path, megatron: dict[str, Any], actor: dict[str, Any]
) -> dict[str, float]:
    """Return the largest differences between packed and padded micro-batches on this rank.

    Args:
        model: The model's folder.
        megatron: The layout's Megatron settings.
        actor: Other actor settings.

    Returns:
        The values from `differences`, and the number of values that a packed replay changed.
    """
    packed, changed = results(model, {**megatron, "use_remove_padding": True}, actor)
    padded, _ = results(model, {**megatron, "use_remove_padding": False}, actor)
    return differences(packed, padded) | {"changed_by_replay": changed}


def differences(made: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the largest differences in log-probs and in gradients, and the number of arrays.

    Differences between gradients are relative to the largest gradient of each tensor.
    """
    assert made.keys() == expected.keys()
    found = dict.fromkeys(("logprobs", "gradient"), 0.0)
    for key, theirs in expected.items():
        what, difference = key.split(":")[0], np.abs(made[key] - theirs).max(initial=0)
        if what == "gradient":
            difference /= max(np.abs(theirs).max(), 1e-3)
        found[what] = max(found[what], float(difference))
    return found | {"tensors": len(expected)}


def results(
    model: Path, megatron: dict[str, Any], actor: dict[str, Any] | None = None
) -> tuple[dict[str, np.ndarray], int]:
    """Compute one mini-batch natively, then replay its routes (R2).

    Args:
        model: The model's folder.
        megatron: The layout's Megatron settings.
        actor: Other actor settings.

    Returns:
        All samples' log-probs and this rank's gradients, keyed by name; and how many of
        these values differ by at least one bit under replay.
    """
    config = config_of(
        megatron={"use_distributed_optimizer": False, **megatron},
        **{**(actor or {}), "ppo_mini_batch_size": len(LENGTHS)},
    )
    position = parallel.start(config.actor_rollout_ref.actor.megatron)
    rank, _ = make_rank(config, position, model)
    data = ragged_data(layout_rules(config, position.data_parallel))
    native = recording_pass(rank, data)
    found = of_update(rank, data, native.logprobs, None)
    replayed = replaying_pass(rank, data, native.routes)
    again = of_update(rank, data, replayed.logprobs, native.routes)
    changed = sum(not np.array_equal(found[name], again[name]) for name in found)
    parts: list[dict[str, np.ndarray]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, native.logprobs)
    for part in parts:
        found |= {f"logprobs:{id}": values for id, values in part.items()}
    assert sum(name.startswith("logprobs:") for name in found) == len(LENGTHS)
    parallel.stop()
    return found, changed


def of_update(rank: Rank, data: Any, logprobs: LogProbs, routes: Any) -> dict[str, np.ndarray]:
    """Return this rank's gradients and log-probs for the mini-batch, keyed by name.

    Args:
        rank: This training rank.
        data: The data returned by `ragged_data`.
        logprobs: The log-probs of this rank's samples.
        routes: Routes to replay, keyed by sample id; None for native routing.
    """
    (mini_batch,) = data.layout.mini_batches
    gradients(rank, data, mini_batch, compared_of(data, logprobs), routes)
    found = {f"logprobs:{id}": values for id, values in logprobs.items()}
    for index, chunk in enumerate(rank.chunks):
        for name, parameter in chunk.named_parameters():
            found[f"gradient:{index}.{name}"] = parameter.main_grad.clone().numpy()
    return found


def compared_of(data: Any, old: LogProbs) -> Compared:
    """Return advantages of -1, 0 and 1 for the samples whose log-probs are on this rank."""
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
    """Return the parts of StepData that a pass needs, built without a store.

    The micro-batches of the log-prob pass differ from those of the update, so padded micro-batches
    split samples at different positions.
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
        routes=None,
        untrained=frozenset(),
        layout=layout,
        layouts={"update": layout, "log_prob": of_logprobs},
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
