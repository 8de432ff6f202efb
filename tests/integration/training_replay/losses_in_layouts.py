"""Gradients of losses with respect to log-probs and entropies, as the trainer computes them.

`layouts.py` calls this module in its processes, for one layout at a time. All inputs of a loss are
drawn with the sample's id as the seed, so that all layouts have the same inputs. G is the number of
response tokens of a sample.
"""

import zlib
from collections.abc import Mapping
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
from pipeline.config.algorithm import RolloutCorrection
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
"""Losses and modes that `make test` covers.

They include each mode, both losses that choose tokens in the mini-batch (Clip-Cov, KL-Cov), means
over a sample with and without a gradient, and a loss that combines two modes.
"""
REJECTING = "rejecting "
"""Name prefix of a loss that is tested with rejection.

Each update then rejects tokens by the log-probs of that update's forward pass.
"""
REJECTION = RolloutCorrection(
    bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold="0.7_1.5"
)
PAIRS = (
    *(
        tuple((name, mode) for name in LOSSES for mode in get_args(AggregationMode))
        if TEST_ALL
        else SAMPLE
    ),
    (REJECTING + "gspo", "token-mean"),
    (REJECTING + "clip_cov", "token-mean"),
)
"""Losses and modes that this test session covers."""
ACTOR: dict[str, Any] = {
    "entropy_coeff": 0.3,
    "use_kl_loss": True,
    "kl_loss_coef": 0.7,
    "kl_loss_type": "mse",
    "clip_ratio_high": 0.3,
}
KINDS = ("new", "old", "advantages", "mask", "weights", "reference", "logprobs", "entropy")
"""Stored values of tokens: the loss's inputs, then its gradients with respect to log-probs and
entropies."""


def config_with(config: RunConfig, name: str, mode: str) -> RunConfig:
    """Return a run's settings with a different loss.

    Args:
        config: The settings.
        name: The loss, with the prefix REJECTING if its updates reject tokens.
        mode: The aggregation mode.
    """
    values = config.model_dump()
    if name.startswith(REJECTING):
        values["algorithm"]["rollout_correction"] = REJECTION.model_dump()
    actor = values["actor_rollout_ref"]["actor"]
    actor |= {**ACTOR, "loss_agg_mode": mode}
    actor["loss_scale_factor"] = 7.0 if mode == "seq-mean-token-sum-norm" else None
    loss_mode = name.removeprefix(REJECTING)
    actor["policy_loss"] |= {"loss_mode": loss_mode, "clip_cov_ratio": 0.1, "kl_cov_ratio": 0.1}
    actor["policy_loss"] |= {"clip_cov_lb": 0.0}
    return RunConfig.model_validate(values)


def drawn(made: LogProbPass) -> Compared:
    """Draw old and reference log-probs near the new ones, advantages, weights and a mask.

    The mask excludes some tokens of each sample, and all tokens of some samples.
    """
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


def sampled_by(old: Mapping[str, np.ndarray], data: StepData) -> Any:
    """Return the samples with the old log-probs in place of the engine's."""
    samples = {id: data.samples[id] for id in data.ids.values()}
    return {id: replace(one, logprobs_G=old.get(id)) for id, one in samples.items()}


def token_gradients(rank: Rank, data: StepData, made: LogProbPass) -> dict[str, np.ndarray]:
    """Compute every loss, and return this rank's part of its values.

    Args:
        rank: This training rank.
        data: The step's data.
        made: The log-prob pass.

    Returns:
        The tokens' values for each loss, mode, kind and sample; 0 for another rank's tokens. Also,
        for each loss and mode, the sums of divisors, policy losses and KL, and the norm of the
        model's gradient.
    """
    compared = drawn(made)
    data = replace(data, samples=sampled_by(compared.old, data))
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
    """Collect new log-probs and the gradients of the loss, keyed by kind, then by sample."""
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
