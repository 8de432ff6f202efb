"""Which results of users' estimators are accepted, and the KL in the reward."""

import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from operators.training.errors import UpdateError
from operators.training.passes import advantages as module
from operators.training.passes.advantages import Tokens, estimate_advantages
from pipeline.config.algorithm import Algorithm
from pipeline.rl.estimators.types import Estimate, OneRank
from pipeline.rl.kl import StepKl

IDS = ("000000/0/0", "000000/0/1")
LENGTHS = (2, 3)


def made_by(function, **settings):
    """Estimate the advantages of two samples with rewards 1 and 3.

    The first token of the second sample is masked out.
    """
    algorithm = Algorithm(**{"adv_estimator": "mine.py:f", **settings})
    rank = SimpleNamespace(
        config=SimpleNamespace(algorithm=algorithm),
        functions={} if function is None else {"algorithm.adv_estimator": function},
        position=SimpleNamespace(samples_group=None),
        chunks=[torch.nn.Linear(1, 1)],
    )
    columns = {"reward": [1.0, 3.0], "not_trained": pa.nulls(2, pa.string())}
    data = SimpleNamespace(
        step=7,
        columns=pa.table(columns),
        rewards_N=np.array([1.0, 3.0]),
        groups_N=np.array([0, 0]),
        ids=dict(enumerate(IDS)),
    )
    tokens = Tokens(
        ids=IDS,
        lengths_X=np.array(LENGTHS),
        mask_T=np.array([True, True, False, True, True]),
        old_T=np.full(5, -1.0),
        reference_T=np.array([-2.0, -1.0, np.nan, -1.0, -1.5]),
        values_T=None,
    )
    return estimate_advantages(rank, data, tokens, 0.5)


def test_a_users_estimator_receives_rollouts_and_settings():
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
        (lambda r, s: 1 / 0, "step 7: algorithm.adv_estimator=mine.py:f raised "
         "ZeroDivisionError: division by zero, for 5 tokens of 2 samples (000000/0/0 to"),
        (lambda r, s: sys.exit(3), "mine.py:f raised SystemExit: 3, for 5 tokens of 2 samples"),
        (lambda r, s: r.scores_T, "mine.py:f returned ndarray, expected an Estimate"),
        (lambda r, s: Estimate(np.zeros(4)), "f returned advantages_T of shape (4,) and type "
         "float64, expected a number for each of this rank's 5 tokens of 2 samples"),
        (lambda r, s: Estimate(np.array(["a"] * 5)), "advantages_T of shape (5,) and type <U1"),
        (lambda r, s: Estimate(r.scores_T, np.zeros(1)), "f returned returns_T of shape (1,)"),
        (lambda r, s: Estimate([[1.0], [2.0, 3.0]]), "f returned advantages_T of type list, "
         "expected a number for each of this rank's 5 tokens of 2 samples (000000/0/0 to "
         "000000/0/1), but numpy cannot convert it: setting an array element with a sequence."),
        (lambda r, s: Estimate(torch.zeros(5, requires_grad=True)), "f returned advantages_T of "
         "type Tensor, expected a number for each of this rank's 5 tokens of 2 samples "
         "(000000/0/0 to 000000/0/1), but numpy cannot convert it: Can't call numpy() on Tensor"),
        (lambda r, s: Estimate(np.zeros(5), torch.zeros(5, dtype=torch.bfloat16)), "f returned "
         "returns_T of type Tensor, expected a number for each"),
        (lambda r, s: Estimate(np.array([0, 0, 0, np.nan, 0])), "step 7, sample 000000/0/1, "
         "response token 1: the advantage by algorithm.adv_estimator=mine.py:f is nan, expected a "
         "finite number (1 of this rank's 5 tokens have no finite value); the step was not"),
        (lambda r, s: Estimate(np.array([0, np.nan, 0, 0, 0])), "step 7, sample 000000/0/0, "
         "response token 1: the advantage by"),
        (lambda r, s: Estimate(np.array([0, 0, 0, 0, np.nan])), "step 7, sample 000000/0/1, "
         "response token 2: the advantage by"),
        (lambda r, s: Estimate(np.zeros(5), np.array([0, np.inf, 0, 0, 0])), "step 7, sample "
         "000000/0/0, response token 1: the return by algorithm.adv_estimator=mine.py:f is inf"),
    ],
)  # fmt: skip
def test_invalid_results_are_refused(function, message):
    with pytest.raises(UpdateError) as caught:
        made_by(function)
    assert message in str(caught.value)


def test_the_first_token_of_a_sample_belongs_to_it():
    tokens = Tokens(IDS, np.array(LENGTHS), np.ones(5, bool), np.zeros(5), None, None)
    with pytest.raises(UpdateError, match="sample 000000/0/1, response token 0: the advantage is"):
        module._refuse(7, tokens, np.array([0, 0, np.nan, 0, 0]), "the advantage")


def test_remax_without_greedy_samples_is_refused():
    """A set that was recorded for a different estimator contains no greedy samples."""
    with pytest.raises(UpdateError, match=r"step 7: .*=remax requires a greedy"):
        made_by(None, adv_estimator="remax")


def test_tokens_that_do_not_count_may_have_any_value():
    estimate, _ = made_by(lambda r, s: Estimate(np.where(r.mask_T, 1.0, np.nan)))
    assert estimate.advantages_T.tolist() == [1, 1, 0, 1, 1]


@pytest.mark.parametrize("kl_penalty", ["kl", "low_var_kl"])
def test_the_kl_to_the_reference_is_subtracted_from_the_scores(monkeypatch, kl_penalty: str):
    """The policy's log-probs are above the reference's at two tokens, by 1 and by 0.5.

    RLOO's advantage is the difference between the two samples' scores.
    """
    monkeypatch.setattr(module, "data_parallel_ranks", lambda rank: OneRank())
    above_T = np.array([1.0, 0, 0, 0, 0.5])
    kl_T = above_T if kl_penalty == "kl" else np.exp(-above_T) + above_T - 1
    expected_T = np.array([0, 1, 0, 0, 3]) - 0.5 * kl_T
    difference = expected_T[:2].sum() - expected_T[2:].sum()

    chosen = {"use_kl_in_reward": True, "kl_penalty": kl_penalty}
    scores, kl = made_by(lambda r, s: Estimate(r.scores_T), **chosen)
    assert scores.advantages_T == pytest.approx(expected_T, rel=1e-12)
    assert kl == StepKl(pytest.approx((kl_T[0] / 2 + kl_T[4] / 2) / 2, rel=1e-12), 2)
    found, _ = made_by(None, adv_estimator="rloo", **chosen)
    signs_T = np.array([1, 1, 0, -1, -1])
    assert found.advantages_T == pytest.approx(signs_T * difference, rel=1e-12)
