"""Random ragged steps for tests of estimators, on one rank or on several ranks in threads."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from pipeline.rl.estimators.types import Estimate, OneRank, Rollouts


@dataclass(frozen=True)
class Settings:
    """The settings that estimators read."""

    norm_adv_by_std_in_grpo: bool = True
    gamma: float = 1.0
    lam: float = 1.0


@st.composite
def steps(draw: st.DrawFn, least: int = 1, most: int = 12) -> Rollouts:
    """Draw a step on one rank; some samples and tokens are excluded from the loss."""
    count = draw(st.integers(least, most))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_step(numbers, count)


def random_step(numbers: np.random.Generator, count: int) -> Rollouts:
    rewards_N = numbers.choice([0.0, 1.0, 0.25, numbers.normal()], count)
    rewards_N[numbers.random(count) < 0.2] = np.nan
    lengths_X = numbers.integers(1, 7, count)
    counts_T = numbers.random(lengths_X.sum()) < 0.8
    counts_T &= ~np.repeat(np.isnan(rewards_N), lengths_X)
    scores_T = np.where(counts_T, -0.1 * numbers.random(len(counts_T)), 0.0)
    scores_T[np.cumsum(lengths_X) - 1] += np.nan_to_num(rewards_N)
    groups_N = np.sort(numbers.integers(0, max(count // 3, 1), count))
    return Rollouts(
        rewards_N=rewards_N,
        groups_N=groups_N,
        rows_X=np.arange(count),
        lengths_X=lengths_X,
        mask_T=counts_T,
        scores_T=scores_T,
        baseline_N=numbers.normal(size=count)[groups_N],
        ranks=OneRank(),
    )


def in_parts(whole: Rollouts, rows_of_rank: list[np.ndarray]) -> list[Rollouts]:
    """Split a step among several ranks, which must run the estimator at the same time."""
    ranks = ThreadRanks(len(rows_of_rank))
    parts = []
    for rows in rows_of_rank:
        of_rank = [np.flatnonzero(whole.sample_T == row) for row in rows]
        at = np.concatenate([np.empty(0, np.int64), *of_rank]).astype(np.int64)
        parts.append(
            replace(
                whole,
                rows_X=whole.rows_X[rows],
                lengths_X=whole.lengths_X[rows],
                mask_T=whole.mask_T[at],
                scores_T=whole.scores_T[at],
                ranks=ranks,
            )
        )
    return parts


def estimated(parts: list[Rollouts], estimate: Callable[[Rollouts], Estimate]) -> list[Estimate]:
    """Run all ranks at the same time, and return the estimate of each rank."""
    found: dict[int, Estimate] = {}

    def run(rank: int) -> None:
        parts[rank].ranks.of_thread(rank)
        found[rank] = estimate(parts[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(len(parts))]


class ThreadRanks:
    """Ranks in threads of one process.

    If one rank does not call `total` when the others do, the barrier breaks.
    """

    def __init__(self, count: int) -> None:
        self._values = [np.empty(0)] * count
        self._barrier = threading.Barrier(count, timeout=30)
        self._own = threading.local()

    def of_thread(self, rank: int) -> None:
        self._own.rank = rank

    def total(self, values: np.ndarray) -> np.ndarray:
        self._values[self._own.rank] = values
        self._barrier.wait()
        result = sum(self._values[1:], start=self._values[0].copy())
        self._barrier.wait()
        return result
