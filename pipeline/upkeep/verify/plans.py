"""The part of `verify` that compares the samples of a step with the planned ones."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow.compute as pc

from pipeline.rl.group_filter import choose
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from pipeline.run.description import RunDescription
from pipeline.run.parse import field, flag, mapping, number, text
from pipeline.run.plan import PlannedPrompt, StepPlan
from pipeline.store import Store
from pipeline.traces.format.ids import baseline_ids, check_ids, expected_ids, named
from pipeline.traces.format.manifest import Manifest
from pipeline.traces.format.shard_rows import BASELINE
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.group_values import group_values
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.stored_run import find_signed_plan

_FILTERS = "algorithm.filter_groups"


def find_plans(
    store: Store, step: int, run: RunDescription | None, report: Report
) -> list[StepPlan]:
    """Return the sub-plans of a step.

    A recorded set gets plan.json last, so its sub-plans are complete only once plan.json exists.

    Args:
        store: The run or recorded set.
        step: The step.
        run: The run's description; None for a recorded set.
        report: Receives problems.

    Returns:
        The sub-plans in order; an empty list if one is missing or damaged.
    """
    found: list[StepPlan] = []
    seen: set[PlannedPrompt] = set()
    of_keys = (keys.sub_plan_number(info.key) for info in store.list(keys.step_prefix(step)))
    numbers = {number for number in of_keys if number is not None}
    if run is None and 0 not in numbers:
        return []
    last = max(numbers, default=0)
    for sub_plan in range(last + 1):
        key = keys.sub_plan(step, sub_plan)
        with report.noting(key):
            plan = find_signed_plan(store, key)
            if isinstance(plan, StepPlan):
                _check_alike(plan, found[0] if found else plan, seen)
                found.append(plan)
            elif last:
                later = keys.sub_plan(step, last)
                raise CorruptObjectError(f"{key}: no such object, but {later} exists")
        if len(found) <= sub_plan:
            return []
    return found


def _check_alike(plan: StepPlan, first: StepPlan, seen: set[PlannedPrompt]) -> None:
    """Raise CorruptObjectError unless a sub-plan fits the previous ones.

    It may differ from the first sub-plan only in its prompts, and must not repeat a prompt.
    """
    if replace(plan, prompts=(), sub_plan=0) != replace(first, prompts=(), sub_plan=0):
        raise CorruptObjectError(
            f"{plan.key}: it differs from {first.key} in more than its prompts; restore the object"
        )
    for prompt in plan.prompts:
        if prompt in seen:
            raise CorruptObjectError(
                f"{plan.key}: {prompt} is in an earlier sub-plan; restore the object"
            )
    seen.update(plan.prompts)


def verify_plans(manifest: Manifest, plans: Sequence[StepPlan], report: Report) -> None:
    """Check that the manifest contains the planned samples, except for rejected groups.

    Args:
        manifest: The manifest of the step.
        plans: The step's sub-plans.
        report: Receives problems.
    """
    version, key = plans[0].policy_version, keys.manifest(manifest.step)
    rejected = {group.group for group in manifest.rejected}
    planned = [id for plan in plans for id in expected_ids(plan)]
    expected = [id for id in planned if id.rpartition("/")[0] not in rejected]
    with report.noting(key):
        check_ids(key, manifest.ids, expected)
        if manifest.policy_versions != (version,):
            raise TraceError(
                f"policy versions {manifest.policy_versions}, expected {version} as in "
                f"{keys.plan(manifest.step)}"
            )
        greedy = pc.equal(manifest.rows["not_trained"], BASELINE).fill_null(False)
        said = set(manifest.rows["id"].filter(greedy).to_pylist())
        baselines = {id for plan in plans for id in baseline_ids(plan)} & set(expected)
        if said != baselines:
            differing = named("these differ", sorted(said ^ baselines))
            raise TraceError(
                f"{key}: {len(said)} samples with not_trained {BASELINE!r}, expected "
                f"{len(baselines)} as planned: {differing}"
            )


def verify_groups(
    store: Store,
    run: RunDescription,
    manifest: Manifest,
    plans: Sequence[StepPlan],
    report: Report,
    pruned: bool,
) -> None:
    """Check that a step's groups were accepted and rejected as the run's settings require.

    Only the number of groups is checked for a pruned step, whose samples are gone, and for a
    replayed step, whose groups follow the settings of a different run.

    Args:
        store: The run.
        run: The run's description.
        manifest: The manifest of the step.
        plans: The step's sub-plans; empty if they are missing.
        report: Receives problems.
        pruned: Whether the step was pruned.
    """
    key = keys.manifest(manifest.step)
    with report.parsing(key):
        filters = _filters(run)
        if not filters.get("enable", False):
            for group in manifest.rejected:
                raise TraceError(
                    f"{key}: group {group.group} is rejected, but {keys.run_json()} has "
                    f"{_FILTERS}.enable=False"
                )
            return
        wanted = field(mapping(run.setting("data")), "train_batch_size", number)
        accepted = list(dict.fromkeys(manifest.rows["group"].to_pylist()))
        if len(accepted) != wanted:
            raise TraceError(
                f"{key}: {len(accepted)} groups, but {keys.run_json()} has "
                f"data.train_batch_size={wanted}"
            )
        if pruned or not plans:
            return
        metric = field(filters, "metric", text)
        values: dict[str, list[float | None]] = {}
        for plan in plans:
            values |= group_values(store, plan, metric)
        choice = choose(values, metric, wanted)
        found = {group.group: group.reason for group in manifest.rejected}
        if found != choice.rejected:
            wrong = sorted(
                group
                for group in found.keys() | choice.rejected.keys()
                if found.get(group) != choice.rejected.get(group)
            )
            raise TraceError(
                f"{key}: {named('rejections that do not follow from the samples', wrong)}: "
                f"{found.get(wrong[0])!r}, expected {choice.rejected.get(wrong[0])!r} according "
                f"to {_FILTERS}"
            )


def _filters(run: RunDescription) -> Mapping[str, Any]:
    """Return the settings of dynamic sampling; {} for a run that is older than these settings."""
    algorithm = mapping(run.settings.get("algorithm", {}))
    filters = mapping(algorithm.get("filter_groups", {}))
    if "enable" in filters:
        field(filters, "enable", flag)
    return filters
