"""Clip-Cov and KL-Cov choose from the whole mini-batch, however it is distributed over ranks."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.actor import Actor
from pipeline.rl.estimators.types import OneRank
from pipeline.rl.losses.choice import Choice, choose_clipped, choose_penalised

T = 2000
ACTOR = Actor.model_validate({"policy_loss": {"clip_cov_ratio": 0.01, "kl_cov_ratio": 0.02}})


def make_choice(seed: int = 0, tied: bool = False) -> Choice:
    rng = np.random.default_rng(seed)
    old_T = -rng.exponential(2.0, T)
    return Choice(
        logprobs_T=old_T * 0 - 1 if tied else old_T + rng.normal(0, 0.1, T),
        old_T=old_T,
        advantages_T=rng.normal(0, 1, T),
        mask_T=rng.random(T) < 0.9,
        drawn_T=rng.permutation(T).astype(np.uint64) << np.uint64(40),
        ranks=OneRank(),
    )


def covariances(tokens: Choice) -> np.ndarray:
    A, new = tokens.advantages_T, tokens.logprobs_T
    mask = tokens.mask_T
    return np.where(mask, (A - A[mask].mean()) * (new - new[mask].mean()), -np.inf)


def test_kl_cov_chooses_the_largest_covariances():
    tokens = make_choice()
    chosen_T = choose_penalised(tokens, ACTOR)
    number = int(0.02 * tokens.mask_T.sum())
    expected = np.argsort(-covariances(tokens))[:number]
    assert sorted(np.flatnonzero(chosen_T)) == sorted(expected)


def test_clip_cov_draws_tokens_within_the_bounds_that_are_not_clipped():
    tokens = make_choice()
    found_T = choose_clipped(tokens, ACTOR)
    ratio = np.exp(tokens.logprobs_T - tokens.old_T)
    A, c = tokens.advantages_T, covariances(tokens)
    clipped = np.where(A > 0, ratio > 1.2, ratio < 0.8)
    among = (c > 1) & (c < 5) & ~clipped
    number = int(0.01 * tokens.mask_T.sum())
    assert among.sum() > 3 * number
    expected = np.flatnonzero(among)[np.argsort(tokens.drawn_T[among])[-number:]]
    assert sorted(np.flatnonzero(found_T)) == sorted(expected)
    other = replace(tokens, drawn_T=np.random.default_rng(9).permutation(tokens.drawn_T))
    assert (choose_clipped(other, ACTOR) != found_T).any()


@pytest.mark.parametrize(
    ("lower", "upper", "expected"), [(1, 3, [0, 1]), (2, 3, []), (-1, 2, [2, 3]), (0, 2, [])]
)
def test_clip_covs_bounds_are_exclusive_and_distant_tokens_may_be_drawn(lower, upper, expected):
    """The covariances are 2, 2, 0 and 0. Without a clamp, the ratio of token 2 would
    overflow."""
    logprobs_T = np.array([1.0, -1.0, 0.0, 0.0])
    tokens = Choice(
        logprobs_T=logprobs_T,
        old_T=logprobs_T - np.array([0.0, 0.0, 1000.0, 0.0]),
        advantages_T=np.array([2.0, -2.0, 0.0, 0.0]),
        mask_T=np.ones(4, bool),
        drawn_T=np.arange(4, dtype=np.uint64),
        ranks=OneRank(),
    )
    bounds = {"clip_cov_ratio": 1.0, "clip_cov_lb": lower, "clip_cov_ub": upper}
    chosen_T = choose_clipped(tokens, Actor.model_validate({"policy_loss": bounds}))
    assert np.flatnonzero(chosen_T).tolist() == expected


def test_at_least_one_token_is_chosen_and_at_most_all():
    tokens = make_choice()
    few = Actor.model_validate({"policy_loss": {"clip_cov_ratio": 1e-9, "kl_cov_ratio": 1e-9}})
    assert choose_clipped(tokens, few).sum() == choose_penalised(tokens, few).sum() == 1
    many = Actor.model_validate({"policy_loss": {"clip_cov_ratio": 1.0, "kl_cov_ratio": 1.0}})
    assert (choose_penalised(tokens, many) == tokens.mask_T).all()
    assert 0 < choose_clipped(tokens, many).sum() < tokens.mask_T.sum()
    nothing = replace(tokens, mask_T=np.zeros(T, bool))
    assert not choose_clipped(nothing, ACTOR).any()
    assert not choose_penalised(nothing, ACTOR).any()


def test_the_drawn_numbers_decide_between_equal_covariances():
    """All log-probs are equal, so all covariances are 0."""
    tokens = make_choice(tied=True)
    tokens = replace(tokens, advantages_T=np.ones(T))
    chosen_T = choose_penalised(tokens, ACTOR)
    number = int(0.02 * tokens.mask_T.sum())
    drawn = np.where(tokens.mask_T, tokens.drawn_T.astype(float), -1)
    assert sorted(np.flatnonzero(chosen_T)) == sorted(np.argsort(drawn)[-number:])


class Together:
    """Ranks that are threads of this process."""

    def __init__(self, number: int) -> None:
        self.barrier = threading.Barrier(number, timeout=60)
        self.sums: dict[int, np.ndarray] = {}

    def total(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over the threads, in a fixed order."""
        self.sums[threading.get_ident()] = values
        self.barrier.wait()
        summed = np.sum([self.sums[key] for key in sorted(self.sums)], axis=0)
        self.barrier.wait()
        return summed


@given(st.integers(0, 100), st.integers(2, 4))
@settings(deadline=None, max_examples=10)
def test_the_choice_is_the_same_on_any_number_of_ranks(seed: int, number: int):
    tokens = make_choice(seed)
    for choose in (choose_clipped, choose_penalised):
        whole_T = choose(tokens, ACTOR)
        together = Together(number)
        found: dict[int, np.ndarray] = {}

        def run(rank: int, choose=choose, together=together, found=found) -> None:
            part = {
                name: value[rank::number]
                for name, value in vars(tokens).items()
                if isinstance(value, np.ndarray)
            }
            found[rank] = choose(replace(tokens, **part, ranks=together), ACTOR)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in range(number):
            assert (found[rank] == whole_T[rank::number]).all()


@pytest.mark.parametrize("choose", [choose_clipped, choose_penalised])
def test_tokens_that_do_not_count_do_not_change_the_choice(choose):
    tokens = make_choice()
    moved_T = np.where(tokens.mask_T, 0, 100.0)
    other = replace(
        tokens,
        advantages_T=tokens.advantages_T + moved_T,
        logprobs_T=tokens.logprobs_T - moved_T,
    )
    assert (choose(other, ACTOR) == choose(tokens, ACTOR)).all()
