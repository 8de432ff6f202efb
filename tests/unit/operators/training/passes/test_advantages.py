"""What a user's estimator may return, and how the KL in the reward is taken."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from operators.training.errors import UpdateError
from operators.training.passes.advantages import Tokens, estimate_advantages
from pipeline.config.algorithm import Algorithm
from pipeline.rl.estimators.types import Estimate

IDS = ("000000/0/0", "000000/0/1")
LENGTHS = (2, 3)


def made_by(function, **settings):
    """The estimate of two samples of rewards 1 and 3; the second's first token does not count."""
    algorithm = Algorithm(**{"adv_estimator": "mine.py:f", **settings})
    rank = SimpleNamespace(
        config=SimpleNamespace(algorithm=algorithm),
        functions={} if function is None else {"algorithm.adv_estimator": function},
        position=SimpleNamespace(samples_group=None),
        chunks=[torch.nn.Linear(1, 1)],
    )
    columns = {
        "reward": pa.chunked_array([pa.array([1.0, 3.0])]),
        "not_trained": pa.chunked_array([pa.array([None, None], pa.string())]),
        "group": pa.chunked_array([pa.array(["a", "a"]).dictionary_encode()]),
    }
    data = SimpleNamespace(step=7, columns=pa.table(columns), ids=dict(enumerate(IDS)))
    tokens = Tokens(
        ids=IDS,
        lengths_X=np.array(LENGTHS),
        mask_T=np.array([True, True, False, True, True]),
        old_T=np.full(5, -1.0),
        reference_T=np.array([-2.0, -1.0, np.nan, -1.0, -1.5]),
        values_T=None,
    )
    return estimate_advantages(rank, data, tokens, 0.5)


def test_what_a_function_gets_and_gives():
    def f(rollouts, settings):
        assert rollouts.scores_T.tolist() == [0, 1, 0, 0, 3]
        assert settings.gamma == 0.5
        return Estimate(rollouts.of_tokens(rollouts.rewards_N).astype(np.float32))

    estimate, kl = made_by(f, gamma=0.5)
    assert estimate.advantages_T.tolist() == [1, 1, 0, 3, 3]
    assert kl is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda r, s: 1 / 0, "step 7: algorithm.adv_estimator=mine.py:f: it raised "
         "ZeroDivisionError: division by zero, with 5 tokens of 2 samples (000000/0/0 to"),
        (lambda r, s: r.scores_T, "mine.py:f: it returned ndarray, expected an Estimate"),
        (lambda r, s: Estimate(np.zeros(4)), "it returned advantages_T of shape (4,) and type "
         "float64, expected a number for each of this rank's 5 tokens of 2 samples"),
        (lambda r, s: Estimate(np.array(["a"] * 5)), "advantages_T of shape (5,) and type <U1"),
        (lambda r, s: Estimate(r.scores_T, np.zeros(1)), "it returned returns_T of shape (1,)"),
        (lambda r, s: Estimate(np.array([0, 0, 0, np.nan, 0])), "step 7, sample 000000/0/1, "
         "response token 1: the advantage by algorithm.adv_estimator=mine.py:f is nan, expected a "
         "finite number (1 of 5 tokens on this rank are not); nothing of the step is trained"),
        (lambda r, s: Estimate(np.zeros(5), np.array([0, np.inf, 0, 0, 0])), "step 7, sample "
         "000000/0/0, response token 1: the return by algorithm.adv_estimator=mine.py:f is inf"),
    ],
)  # fmt: skip
def test_what_is_refused(function, message):
    with pytest.raises(UpdateError) as caught:
        made_by(function)
    assert message in str(caught.value)


def test_remax_without_greedy_samples():
    """As in a recorded set that another estimator made."""
    with pytest.raises(UpdateError, match=r"step 7: .*=remax compares with a greedy"):
        made_by(None, adv_estimator="remax")


def test_tokens_that_do_not_count_may_have_anything():
    estimate, _ = made_by(lambda r, s: Estimate(np.where(r.mask_T, 1.0, np.nan)))
    assert estimate.advantages_T.tolist() == [1, 1, 0, 1, 1]
