"""The results of an arm's run, read from the store, and the step of its collapse."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import retrace
from examples.mismatch.arms import ArmRun
from pipeline import exits
from pipeline.cli.printable import printable
from pipeline.metrics.metric import layers_of
from pipeline.run import keys
from pipeline.upkeep.run_list import find_run

REWARD = "critic/rewards/mean"
KL, KL_NATIVE = "mismatch/kl", "mismatch/kl_native"
EXTREME, EXTREME_NATIVE = "mismatch/extreme_share", "mismatch/extreme_share_native"
ENTROPY, GRAD_NORM = "actor/entropy", "actor/grad_norm"
CLIPPED = "actor/pg_clipfrac"

WINDOW = 3
"""The number of steps over which rewards are averaged, because the reward of one step is noisy."""
FALL = 0.5
"""An arm counts as collapsed if its mean reward falls below this share of its earlier best."""


def collapse_step(rewards: Sequence[float | None]) -> int | None:
    """Return the step at which an arm collapsed; None if it did not collapse.

    An arm has collapsed if the mean reward of three consecutive steps is below half of the best
    such mean earlier in the run. The returned step is the last of the three. A step without a
    reward counts as 0. An arm that recovers later still counts as collapsed.
    """
    means = moving_means(rewards)
    for i in range(1, len(means)):
        if means[i] < FALL * max(means[:i]):
            return i + WINDOW - 1
    return None


def moving_means(rewards: Sequence[float | None]) -> list[float]:
    """Return the means of WINDOW consecutive steps, beginning with the first WINDOW steps."""
    numbers = [0.0 if reward is None else reward for reward in rewards]
    return [float(np.mean(numbers[i : i + WINDOW])) for i in range(len(numbers) - WINDOW + 1)]


@dataclass(frozen=True)
class Result:
    """The stored results of an arm's run. Example: Result(run, {REWARD: [0.4]}, [None])."""

    run: ArmRun
    metrics: dict[str, list[float | None]]
    """One value per finished step, keyed by metric; None if the step did not measure it."""
    agreement_by_layer: list[dict[int, float] | None]
    """The agreement of each layer, per finished step; None for a step without replay."""
    failure: str | None = None
    """The error that ended the run; None if its newest attempt did not fail."""

    @property
    def steps(self) -> int:
        """The number of finished steps."""
        return len(self.agreement_by_layer)

    def values(self, name: str) -> list[float | None]:
        """Return a metric's value in each step; None for steps that did not measure it."""
        return self.metrics.get(name) or [None] * self.steps

    def measured(self, name: str) -> list[float]:
        """Return a metric's values from the steps that measured it."""
        return [value for value in self.values(name) if value is not None]

    @property
    def collapse(self) -> int | None:
        """The step at which the arm collapsed; None if it did not collapse."""
        return collapse_step(self.values(REWARD))

    @property
    def end(self) -> str | None:
        """The step that failed, and the error; None if the run did not fail."""
        return None if self.failure is None else f"ended at step {self.steps}: {self.failure}"


def read_result(run: ArmRun) -> Result | None:
    """Return the results of a run's finished steps, and how the run failed.

    If the run has no finished step and did not fail, or if there is no such run, return None.
    Raises retrace.StoreError.
    """
    if not (run.uri / keys.run_json()).is_file():
        return None
    opened = retrace.open_run(run.uri)
    table = opened.metrics().to_pydict()
    steps = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    layers = [layers_of(step, "replay/agreement") or None for step in steps]
    del table["step"]
    listed = find_run(str(run.uri))
    failure = _error(listed.message) if listed is not None and listed.state == "failed" else None
    return Result(run, table, layers, failure) if layers or failure is not None else None


def _error(message: str) -> str:
    """Return the error of the training rank that failed first, or else the message's first line."""
    of_rank = re.search(exits.RANK_FAILED % (r"\d+", "(.+)"), message)
    return printable(of_rank[1] if of_rank else message.partition("\n")[0])
