"""Log-probs that are not finite reach neither the loss nor its gradient."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from operators.training.passes import advantages
from operators.training.passes.compared import compare
from operators.training.passes.corrected import correct_samples
from pipeline.config.algorithm import Algorithm
from pipeline.rl.estimators import types as estimators
from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.types import LossTokens
from tests.integration.training_replay.sealed import config_of
from tests.unit.rl.losses.batches import OneRank

IDS = ("000000/0/0", "000000/0/1")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advantages, "data_parallel_ranks", lambda rank: estimators.OneRank())


def inputs(engine: dict[str, list[float]], **correction: Any) -> tuple[Any, Any]:
    """Return a rank and the data of two samples of three tokens with rewards 1 and 3."""
    config = config_of(algorithm={"rollout_correction": correction})
    position = SimpleNamespace(last_stage=True, samples_group=None)
    rank: Any = SimpleNamespace(
        config=config, functions={}, position=position, chunks=[torch.nn.Linear(1, 1)]
    )
    samples = {
        id: SimpleNamespace(
            id=id,
            finish_reason="stop",
            loss_mask_G=np.ones(3, bool),
            logprobs_G=np.array(engine[id], np.float32),
        )
        for id in IDS
    }
    data: Any = SimpleNamespace(
        step=0,
        samples=samples,
        ids=dict(enumerate(IDS)),
        untrained=frozenset(),
        rewards_N=np.array([1.0, 3.0]),
        groups_N=np.array([0, 0]),
        columns=pa.table({"reward": [1.0, 3.0], "not_trained": pa.nulls(2, pa.string())}),
    )
    return rank, data


ENGINE = {IDS[0]: [-1.0, -2.0, -3.0], IDS[1]: [-1.0, np.nan, -3.0]}
OLD = {id: np.full(3, -1.5, np.float32) for id in IDS}


@pytest.mark.parametrize(
    ("correction", "kept"),
    [({}, [True, True, True]), ({"rollout_is": "token"}, [True, False, True])],
)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_the_trainers_and_the_engines_logprobs(value, correction, kept):
    rank, data = inputs(ENGINE, **correction)
    old = {**OLD, IDS[0]: np.array([-1.5, value, -1.5], np.float32)}
    found = compare(rank, data, old, None)
    assert found.mask[IDS[0]].tolist() == [True, False, True]
    assert found.mask[IDS[1]].tolist() == kept
    assert found.advantages[IDS[0]][1] == 0
    assert all(np.isfinite(of_G).all() for of_G in found.old.values())
    if found.weights is not None:
        assert all(np.isfinite(of_G).all() for of_G in found.weights.values())


@pytest.mark.parametrize("name", LOSSES)
def test_a_dropped_token_leaves_all_gradients_finite(name):
    rank, data = inputs(ENGINE)
    old = {**OLD, IDS[0]: np.array([-1.5, np.nan, -1.5], np.float32)}
    found = compare(rank, data, old, None)
    logprobs_T = torch.full((6,), -1.4, requires_grad=True)
    sample_T = torch.tensor([0, 0, 0, 1, 1, 1])

    def joined(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([values[id] for id in IDS]))

    mask_T = joined(found.mask)
    tokens = LossTokens(
        logprobs_T=logprobs_T,
        old_T=joined(found.old),
        advantages_T=joined(found.advantages),
        mask_T=mask_T,
        entropy_T=torch.zeros(6),
        weights_T=None,
        samples=OneRank(sample_T, mask_T),
        chosen_T=torch.zeros(6, dtype=torch.bool),
    )
    loss_T = LOSSES[name].function(tokens, rank.config.actor_rollout_ref.actor).loss_T
    torch.where(mask_T, loss_T, 0).sum().backward()
    assert torch.isfinite(logprobs_T.grad).all()
    assert logprobs_T.grad[1] == 0


def test_the_estimator_sees_only_the_tokens_that_are_left():
    """The KL in the reward is 0 at a dropped token."""
    rank, data = inputs(ENGINE)
    algorithm = {"use_kl_in_reward": True, "kl_penalty": "kl", "norm_adv_by_std_in_grpo": False}
    rank.config = SimpleNamespace(algorithm=Algorithm(**algorithm))
    old = {**OLD, IDS[0]: np.array([-1.5, np.nan, -1.5], np.float32)}
    reference = {id: np.full(3, -2.5, np.float32) for id in IDS}
    found = compare(rank, data, old, reference, kl_coef=0.1)
    assert found.kl is not None
    # Rewards 1 - 2 * 0.1 and 3 - 3 * 0.1, minus their mean.
    np.testing.assert_allclose(found.advantages[IDS[0]], [-0.95, 0, -0.95], rtol=1e-6)
    np.testing.assert_allclose(found.advantages[IDS[1]], 0.95, rtol=1e-6)


def test_bypass_mode_replaces_unknown_logprobs_of_the_engine():
    rank, data = inputs(ENGINE, bypass_mode=True)
    found = compare(rank, data, None, None)
    assert [of_G.tolist() for of_G in found.old.values()] == [[-1, -2, -3], [-1, 0, -3]]


@pytest.mark.parametrize("bypass", [False, True])
def test_bypass_mode_needs_the_engines_log_prob_of_each_token(bypass: bool):
    rank, data = inputs(ENGINE, bypass_mode=bypass)
    mask = {id: np.ones(3, bool) for id in IDS}
    found = correct_samples(rank, data, OLD, mask)
    assert found.mask_T.tolist() == [True] * 4 + [not bypass, True]
