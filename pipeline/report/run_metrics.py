"""The metrics of a run, read from its store."""

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.run import keys
from pipeline.run.commit import find_commit, parsing
from pipeline.run.parse import field, numbers
from pipeline.run.plan import find_counts, find_plan
from pipeline.store import Store

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class StepMetrics:
    """A step's metrics as the trainer committed them. None in `values`: not measured."""

    step: int
    values: Metrics


def read_metrics(store: Store, step: int) -> StepMetrics | None:
    """A step's metrics, None if the step is not finished. Raises CorruptObjectError."""
    body = find_commit(store, keys.metrics(step))
    if body is None:
        return None
    with parsing(store, keys.metrics(step)):
        return StepMetrics(step, field(body, "metrics", numbers))


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


def read_validation(store: Store, version: int) -> Validation | None:
    """A policy version's validation; None while it, or a part of it, is missing.

    Raises CorruptObjectError.
    """
    plan = find_plan(store, keys.validation_plan(version))
    if plan is None:
        return None
    total, count = 0.0, 0
    for shard in range(plan.shards):
        found = find_counts(store, plan, shard)
        if found is None:
            return None
        total, count = total + found.reward_sum, count + found.count
    return Validation(version, count, total / count if count else None)


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
