"""The metrics of a run, read from its store."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pipeline.metrics.former import Metrics, named_today
from pipeline.rl.extra_means import REWARD, source_means
from pipeline.run import keys, parse
from pipeline.run.commit import find_commit, parsing
from pipeline.run.plan import find_counts, find_plan
from pipeline.store import Store


@dataclass(frozen=True)
class StepMetrics:
    """A step's metrics as the trainer committed them."""

    step: int
    values: Metrics
    """Under today's names, whatever version wrote them. None: not measured."""


def read_metrics(store: Store, step: int) -> StepMetrics | None:
    """A step's metrics, None if the step is not finished. Raises CorruptObjectError."""
    body = find_commit(store, keys.metrics(step))
    if body is None:
        return None
    with parsing(store, keys.metrics(step)):
        return StepMetrics(step, named_today(parse.field(body, "metrics", parse.numbers)))


def all_metrics(store: Store) -> list[StepMetrics]:
    """Metrics of the finished steps from step 0 on, up to the first unfinished one.

    One read per step: not for a loop over steps.
    """
    found: list[StepMetrics] = []
    while (metrics := read_metrics(store, len(found))) is not None:
        found.append(metrics)
    return found


@dataclass(frozen=True)
class Validation:
    """How a policy did on the validation prompts."""

    version: int
    samples: int
    """Samples with a reward."""
    reward: float | None
    """Mean; None: no sample has one (reward.on_error=mask)."""
    samples_per_prompt: int = 1
    sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By data source and name, the means of `reward` and of what the reward function returned
    beside the score; {}: an older worker stored none."""

    def metrics(self) -> Metrics:
        """The numbers for trackers, under verl's names.

        A data source's first number is `acc` where there is one, else the reward; the others are
        auxiliary.
        """
        found: Metrics = {"val/reward/mean": self.reward}
        for source, means in self.sources.items():
            core = "acc" if "acc" in means else REWARD
            for name, mean in means.items():
                group = "val-core" if name == core else "val-aux"
                found[f"{group}/{source}/{name}/mean@{self.samples_per_prompt}"] = mean
        return found


def read_validation(store: Store, version: int) -> Validation | None:
    """A policy version's validation; None while it, or a part of it, is missing.

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
    """The versions whose validation is missing: those that can be validated, and those whose policy
    is no longer in the store. `finished` steps are finished."""
    missing = [version for version in versions if read_validation(store, version) is None]
    gone = [v for v in missing if v <= finished and store.size(keys.policy(v)) is None]
    return [version for version in missing if version not in gone], gone


def validation_rewards(store: Store, versions: Iterable[int]) -> dict[int, float | None]:
    """Mean reward of each policy version whose validation is complete."""
    found = (read_validation(store, version) for version in versions)
    return {validation.version: validation.reward for validation in found if validation}
