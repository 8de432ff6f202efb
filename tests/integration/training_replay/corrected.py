"""Compute corrections in a layout: weights, masks and losses per sample and mini-batch."""

import types
import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from operators.training.batches.step_data import StepData
from operators.training.passes.compared import compare
from operators.training.passes.logprob_pass import LogProbs
from operators.training.passes.totals import totals_of
from operators.training.passes.update import gradients
from operators.training.rank import Rank
from pipeline.config.algorithm import RolloutCorrection
from pipeline.rl.corrections.report import correction_metrics
from pipeline.rl.moments import Tally

STEP = RolloutCorrection(
    rollout_is="token",
    rollout_is_threshold=1.2,
    rollout_is_batch_normalize=True,
    rollout_rs="token_k1,seq_max_k3",
    rollout_rs_threshold="0.6_1.7,0.25",
    rollout_token_veto_threshold=0.5,
)
BYPASS = RolloutCorrection(
    bypass_mode=True,
    loss_type="reinforce",
    rollout_is="sequence",
    rollout_is_threshold=1.5,
    rollout_rs="token_k1",
    rollout_rs_threshold="0.6_1.7",
)


def corrections_of(rank: Rank, data: StepData, old: LogProbs) -> dict[str, Any]:
    """Return this rank's corrections for an engine whose log-probs differ from the trainer's.

    Args:
        rank: This training rank.
        data: The step's data.
        old: Old log-probs, keyed by sample id.

    Returns:
        The corrections as JSON-compatible values.
    """
    noisy = replace(data, samples=with_noise(data))
    stepped = with_correction(rank, STEP)
    compared = compare(stepped, noisy, old, None)
    first, *_ = batches = data.layout.mini_batches
    found: dict[str, Any] = {
        "kept": [vars(totals_of(stepped, noisy, one, compared)[0]) for one in batches],
        "mask": {id: mask.tolist() for id, mask in compared.mask.items()},
        "weights": {id: weights.tolist() for id, weights in (compared.weights or {}).items()},
    }
    bypassed = with_correction(rank, BYPASS)
    tallies: list[Tally] = []
    reports, _ = gradients(
        bypassed, noisy, first, compare(bypassed, noisy, None, None), None, tallies
    )
    if rank.position.speaks_for_tokens:
        names = ("tokens", "policy", "log_ratio")
        found["sums"] = {name: sum(float(report[name]) for report in reports) for name in names}
    if rank.position.speaks_for_samples:
        of_rank = sum(tallies, start=Tally())
        found["moments"] = {name: vars(one) for name, one in of_rank.moments.items()}
        found["metrics"] = correction_metrics(BYPASS.correction, of_rank)
    return found


def with_correction(rank: Rank, correction: RolloutCorrection) -> Rank:
    """Return the rank with different correction settings."""
    algorithm = rank.config.algorithm.model_copy(update={"rollout_correction": correction})
    config = rank.config.model_copy(update={"algorithm": algorithm})
    return replace(rank, config=config)


def with_noise(data: StepData) -> Any:
    """Return the samples with noise (std 0.3) in the engine's log-probs.

    The noise is the same in every layout.
    """

    def noisy(id: str) -> Any:
        sample = data.samples[id]
        rng = np.random.default_rng(zlib.crc32(id.encode()))
        noise_G = rng.normal(0, 0.3, len(sample.logprobs_G)).astype(np.float32)
        return replace(sample, logprobs_G=sample.logprobs_G + noise_G)

    return types.MappingProxyType({id: noisy(id) for id in data.ids.values()})
