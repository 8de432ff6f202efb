"""The metrics of a run, read from its store."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pipeline.metrics.metric import Metrics
from pipeline.rl.extra_means import REWARD, source_means
from pipeline.run import keys
from pipeline.run.commit import find_commit_of, parsing
from pipeline.run.parse import typed
from pipeline.run.plan import find_counts, find_plan
from pipeline.run.restarts import finished_steps
from pipeline.store import Store


@dataclass(frozen=True)
class StepMetrics:
    """A step's metrics as the trainer committed them."""

    step: int
    values: Metrics
    """Values by metric name; None for a metric that was not measured."""


def read_metrics(store: Store, step: int) -> StepMetrics | None:
    """Return a step's metrics; None if the step is not finished. Raises CorruptObjectError."""
    body = find_commit_of(store, keys.metrics(step), {"step": step})
    if body is None:
        return None
    with parsing(store, keys.metrics(step)):
        return StepMetrics(step, typed(body, "metrics", dict[str, float | None]))


def all_metrics(store: Store) -> list[StepMetrics]:
    """Return the metrics of the finished steps, in order.

    Each call reads the metrics of all steps, so do not call this function in a loop over steps.
    Raises CorruptObjectError if the metrics of a step are damaged, or are missing although those of
    a later step exist.
    """
    found = (read_metrics(store, step) for step in range(finished_steps(store)))
    return [metrics for metrics in found if metrics is not None]


@dataclass(frozen=True)
class Validation:
    """A policy version's results on the validation prompts."""

    version: int
    rewards: int
    """Number of samples with a reward."""
    reward: float | None
    """Mean reward; None if no sample has a reward (reward.on_error=mask)."""
    samples_per_prompt: int = 1
    sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Means of `reward` and of the numbers that the reward function returned with the score.

    They are keyed by data source, then by name.
    """

    def metrics(self) -> Metrics:
        """Return the means for trackers, under verl's names.

        The core metric (val-core) of a data source is the mean of `acc` if the reward function
        returned it, otherwise the mean reward. All other metrics are auxiliary (val-aux).
        """
        found: Metrics = {"val/reward/mean": self.reward}
        for source, means in self.sources.items():
            core = "acc" if "acc" in means else REWARD
            for name, mean in means.items():
                group = "val-core" if name == core else "val-aux"
                found[f"{group}/{source}/{name}/mean@{self.samples_per_prompt}"] = mean
        return found


def read_validation(store: Store, version: int) -> Validation | None:
    """Return the validation of a policy version; None while its plan or any shard is missing.

    Raises CorruptObjectError.
    """
    plan = find_plan(store, keys.validation_plan(version))
    if plan is None:
        return None
    total, count = 0.0, 0
    sources = []
    for shard in range(plan.shards):
        found = find_counts(store, plan, shard)
        if found is None:
            return None
        total, count = total + found.reward_sum, count + found.count
        sources.append(found.sources)
    mean = total / count if count else None
    return Validation(version, count, mean, plan.n, source_means(sources))


def missing_validations(
    store: Store, versions: Iterable[int], finished: int
) -> tuple[list[int], list[int]]:
    """Return the policy versions whose validation is missing.

    Args:
        store: The run's store.
        versions: The policy versions to validate.
        finished: The number of finished steps.

    Returns:
        The versions that the run can still validate, and those whose policy is no longer in the
        store.
    """
    missing = [version for version in versions if read_validation(store, version) is None]
    gone = [v for v in missing if v <= finished and store.size(keys.policy(v)) is None]
    return [version for version in missing if version not in gone], gone


def newest_validations(store: Store, versions: Sequence[int], most: int) -> list[Validation]:
    """Return the complete validations among the given policy versions, oldest first.

    Args:
        store: The run's store.
        versions: Policy versions, ascending.
        most: The maximum number of validations to return; older ones are left out.
    """
    found = (read_validation(store, version) for version in reversed(versions))
    return list(islice(filter(None, found), most))[::-1]


def validation_rewards(store: Store, versions: Iterable[int]) -> dict[int, float | None]:
    """Return the mean reward of each policy version whose validation is complete."""
    found = (read_validation(store, version) for version in versions)
    return {validation.version: validation.reward for validation in found if validation}
