"""What each token's loss does to its log-prob and its entropy, in one layout, by the trainer.

Run by `layouts.py` in its processes. Every number that a loss compares with is drawn by the
sample's id, so that all layouts have the same. Letters: G response tokens of a sample.
"""

import zlib
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from operators.training.batches.step_data import StepData
from operators.training.passes import update
from operators.training.passes.compared import Compared
from operators.training.passes.logprob_pass import LogProbPass
from operators.training.rank import Rank
from pipeline.config.tree import RunConfig
from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.aggregate import AggregationMode
from tests.exhaustive import TEST_ALL

SAMPLE = (
    ("clip_cov", "token-mean"),
    ("geo_mean", "token-mean"),
    ("gspo", "seq-mean-token-sum"),
    ("kl_cov", "seq-mean-token-mean"),
    ("vanilla", "seq-mean-token-sum-norm"),
)
"""Each mode, both choices over the mini-batch, a mean of a sample with and one without a gradient,
and two modes in one loss."""
PAIRS = (
    tuple((name, mode) for name in LOSSES for mode in get_args(AggregationMode))
    if TEST_ALL
    else SAMPLE
)
"""Losses and modes that this run of the tests goes through."""
ACTOR: dict[str, Any] = {
    "entropy_coeff": 0.3,
    "use_kl_loss": True,
    "kl_loss_coef": 0.7,
    "kl_loss_type": "mse",
    "clip_ratio_high": 0.3,
}
KINDS = ("new", "old", "advantages", "mask", "weights", "reference", "logprobs", "entropy")
"""Values of tokens that are left by sample: what the loss read, and the gradients of two of it."""


def config_with(config: RunConfig, name: str, mode: str) -> RunConfig:
    """The settings of a run with another loss."""
    values = config.model_dump()
    actor = values["actor_rollout_ref"]["actor"]
    actor |= {**ACTOR, "loss_agg_mode": mode}
    actor["loss_scale_factor"] = 7.0 if mode == "seq-mean-token-sum-norm" else None
    actor["policy_loss"] |= {"loss_mode": name, "clip_cov_ratio": 0.1, "kl_cov_ratio": 0.1}
    actor["policy_loss"] |= {"clip_cov_lb": 0.0}
    return RunConfig.model_validate(values)


def drawn(made: LogProbPass) -> Compared:
    """Old and reference log-probs near the new ones, advantages, weights and a mask. Of each sample
    some tokens do not count, of some samples none."""
    values: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in KINDS[1:6]}
    for id, new_G in made.logprobs.items():
        rng = np.random.default_rng(zlib.crc32(id.encode()))
        G = len(new_G)
        of_sample = {
            "old": new_G + rng.normal(0, 0.3, G),
            "advantages": np.full(G, rng.normal()),
            "mask": (rng.random(G) < 0.8) & (rng.random() < 0.8),
            "weights": rng.uniform(0.5, 2, G),
            "reference": new_G + rng.normal(0, 0.3, G),
        }
        for kind, values_G in of_sample.items():
            values[kind][id] = values_G.astype(bool if kind == "mask" else np.float32)
    return Compared(**values)


def token_gradients(rank: Rank, data: StepData, made: LogProbPass) -> dict[str, np.ndarray]:
    """By loss, mode, kind and sample, what this rank has of it, 0 where another has it; by loss and
    mode the sums of divisors, policy losses and KL, and the norm of the model's gradient."""
    compared = drawn(made)
    mini_batch = data.layout.mini_batches[0]
    found: dict[str, np.ndarray] = {}
    for name, mode in PAIRS:
        config = config_with(rank.config, name, mode)
        with pytest.MonkeyPatch.context() as patch:
            taken = _watched(patch)
            reports, _ = update.gradients(
                replace(rank, config=config), data, mini_batch, compared, made.routes
            )
        rank.optimizer.prepare_grads()
        norm = rank.optimizer.get_grad_norm()
        if not rank.position.speaks_for_tokens:
            continue
        found[f"{name}:{mode}:norm"] = np.array(norm)
        for kind, by_sample in taken.items():
            found |= {f"{name}:{mode}:{kind}:{id}": x for id, x in by_sample.items()}
        for what in ("divisor", "policy", "kl"):
            total = sum(float(report[what]) for report in reports)
            found[f"{name}:{mode}:sum:{what}"] = np.array(total)
        if rank.position.speaks_for_samples and name == PAIRS[0][0] and mode == PAIRS[0][1]:
            ids = [data.ids[row] for row in mini_batch.rows(rank.position.dp_rank).tolist()]
            for kind in KINDS[1:6]:
                found |= {f"read:{kind}:{id}": getattr(compared, kind)[id] for id in ids}
    return found


def _watched(patch: pytest.MonkeyPatch) -> dict[str, dict[str, np.ndarray]]:
    """New log-probs, and gradients of log-probs and entropies, by kind and sample."""
    original = update.response_logprobs
    taken: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in ("new", "logprobs", "entropy")}

    def watched(rank: Any, chunks: Any, response: Any, *rest: Any, **named: Any) -> Any:
        logprobs_T, entropy_T = original(rank, chunks, response, *rest, **named)

        def take(kind: str, values_T: torch.Tensor) -> None:
            values_U = np.zeros(sum(response.lengths))
            values_U[response.own_T] = values_T.detach().double().numpy()
            taken[kind] |= response.split(values_U)

        take("new", logprobs_T)
        logprobs_T.register_hook(lambda gradient_T: take("logprobs", gradient_T))
        entropy_T.register_hook(lambda gradient_T: take("entropy", gradient_T))
        return logprobs_T, entropy_T

    patch.setattr(update, "response_logprobs", watched)
    return taken
