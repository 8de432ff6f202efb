"""What an arm left in the store, and when it collapsed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import retrace
from examples.mismatch.arms import ArmRun
from pipeline.run import keys
from pipeline.run.commit import read_commit

REWARD = "critic/rewards/mean"
KL, KL_NATIVE = "mismatch/kl", "mismatch/kl_native"
EXTREME, EXTREME_NATIVE = "mismatch/extreme_share", "mismatch/extreme_share_native"
ENTROPY, GRAD_NORM = "actor/entropy", "actor/grad_norm"
CLIPPED = "actor/pg_clipfrac"

WINDOW = 3
"""Steps whose mean reward is looked at: single steps are noisy."""
FALL = 0.5
"""Share of the best mean reward below which an arm has collapsed."""


def collapse_step(rewards: Sequence[float | None]) -> int | None:
    """The step at which an arm collapsed; None: it did not.

    The rule: the mean reward of three steps in a row is below half of the best such mean that the
    arm had before. The step is the last of the three. A step without a reward counts as 0: nothing
    could be scored. Whether an arm recovers later is not asked.
    """
    means = moving_means(rewards)
    for i in range(1, len(means)):
        if means[i] < FALL * max(means[:i]):
            return i + WINDOW - 1
    return None


def moving_means(rewards: Sequence[float | None]) -> list[float]:
    """Means of WINDOW steps in a row: the first is of the first WINDOW steps."""
    numbers = [0.0 if reward is None else reward for reward in rewards]
    return [float(np.mean(numbers[i : i + WINDOW])) for i in range(len(numbers) - WINDOW + 1)]


@dataclass(frozen=True)
class Result:
    """A run of an arm as the store has it. Example: Result(run, {REWARD: [0.4]}, [None])."""

    run: ArmRun
    metrics: dict[str, list[float | None]]
    """A value per finished step, by metric; None: not measured."""
    agreement_by_layer: list[dict[int, float] | None]
    """Per finished step; None: nothing was replayed."""

    @property
    def steps(self) -> int:
        """Finished ones."""
        return len(self.agreement_by_layer)

    def values(self, name: str) -> list[float | None]:
        """A metric by step, of steps that did not measure it None."""
        return self.metrics.get(name) or [None] * self.steps

    def measured(self, name: str) -> list[float]:
        """A metric's values without the steps that did not measure it."""
        return [value for value in self.values(name) if value is not None]

    @property
    def collapse(self) -> int | None:
        """The step of `collapse_step`."""
        return collapse_step(self.values(REWARD))


def read_result(run: ArmRun) -> Result | None:
    """What a run has finished so far; None: no step, or no run. Raises retrace.StoreError."""
    if not (run.uri / keys.run_json()).is_file():
        return None
    opened = retrace.open_run(run.uri)
    table = opened.metrics().to_pydict()
    layers = []
    for step in table.pop("step"):
        shares = read_commit(opened.store, keys.metrics(step)).get("agreement_by_layer")
        layers.append(shares and {int(layer): share for layer, share in shares.items()})
    return Result(run, table, layers) if layers else None
