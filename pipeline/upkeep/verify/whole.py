"""The full offline check of a run or recorded set.

The check covers every byte and row of each step, the joins of manifests with training sets, and all
other files of a run. The findings are collected in a report instead of being raised, so one damaged
object does not hide the problems in other objects.
"""

import re
from functools import cache
from itertools import pairwise

from pipeline.run import keys
from pipeline.run.amendments import Amendment, amended, read_amendments
from pipeline.run.commit import DataFile
from pipeline.run.description import RunDescription
from pipeline.store import Store, StoreError
from pipeline.upkeep.lost_commits import lost_amendments, lost_manifests, lost_policies
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.chains import verify_policies
from pipeline.upkeep.verify.samples_pass import StagedPrompts, read_prompts
from pipeline.upkeep.verify.sealed_steps import verify_step
from pipeline.upkeep.verify.step_of_run import check_settings
from pipeline.upkeep.verify.stored_run import (
    find_signed_description,
    verify_amended,
    verify_attempts,
    verify_checkpoints,
    verify_inputs,
    verify_validations,
)

_COMMIT = re.compile(r"steps/\d{6}/(rollout/|training/)?[^/]+\.json")


def verify(store: Store, step: int | None = None) -> Report:
    """Check an entire run or recorded set, or only one step."""
    report = Report(store.uri)
    run = None
    with report.noting(keys.run_json()):
        run = find_signed_description(store)
    for info in store.list("" if step is None else keys.step_prefix(step)):
        if info.problem:
            report.add(info.key, info.problem)
    there = [info.key for info in store.list(keys.steps())]
    commits = {key for key in there if _COMMIT.fullmatch(key)}
    steps = sorted({keys.folder_number(key) or 0 for key in commits}) if step is None else [step]
    amendments = _amendments(store, run)
    prompts_in = cache(lambda file: _prompts(store, file, report))
    for number in steps:
        with report.noting(keys.manifest(number)):
            at = run and amended(run, [one for one in amendments if one.from_step <= number])
            prompts = None if at is None else prompts_in(at.inputs.prompts)
            verify_step(store, number, at, prompts, report)
    with report.noting(keys.run_json()):
        for number, text in lost_manifests(store, there).items():
            if number in steps:
                report.add(keys.manifest(number), text)
    if run is not None:
        _verify_order(commits, step, report)
    if step is not None:
        return report
    if not any(problem.key == keys.run_json() for problem in report.problems):
        with report.noting(keys.run_json()):
            verify_inputs(store, run, report)
            if run is not None:
                check_settings(run, keys.run_json())
    for count, one in enumerate(amendments, 1):
        with report.noting(keys.amendment(one.number)):
            if run is not None:
                check_settings(amended(run, amendments[:count]), keys.amendment(one.number))
    now = run and amended(run, amendments)
    val_prompts = prompts_in(now.inputs.val_prompts) if now and now.inputs.val_prompts else None
    with report.noting(keys.validations()):
        verify_validations(store, val_prompts, report)
    for prefix, check in (
        (keys.attempts(), verify_attempts),
        (keys.policies(), verify_policies),
        (keys.checkpoints(), verify_checkpoints),
        (keys.amendments(), verify_amended),
    ):
        with report.noting(prefix):
            check(store, report)
    with report.noting(keys.policies()):
        for key, text in lost_policies(store).items():
            report.add(key, text)
    with report.noting(keys.amendments()):
        for key, text in lost_amendments(store).items() if run is not None else ():
            report.add(key, text)
    return report


def _amendments(store: Store, run: RunDescription | None) -> list[Amendment]:
    """Return a run's amendments; [] if they are damaged, which `staged_files` reports."""
    if run is None:
        return []
    try:
        found = read_amendments(store)
        amended(run, found)
    except StoreError:
        return []
    return found


def _prompts(store: Store, file: DataFile, report: Report) -> StagedPrompts | None:
    """Return a table of staged prompts; None if it is damaged, which is reported."""
    with report.noting(file.key):
        return read_prompts(store, file)
    return None


def _verify_order(commits: set[str], step: int | None, report: Report) -> None:
    """Report objects of one step or of all steps that are missing although later ones exist."""
    numbers = {keys.folder_number(key) or 0 for key in commits}
    for number in sorted(numbers if step is None else numbers & {step}):
        shard, plan = keys.rollout(number, 0), keys.plan(number)
        if shard in commits and plan not in commits:
            report.add(plan, f"no such object, but the step was rolled out: {shard}")
    trained = [-1, *sorted(number for number in numbers if keys.metrics(number) in commits)]
    for earlier, later in pairwise(trained):
        lost = earlier + 1 if step is None else step
        if earlier < lost < later:
            metrics = keys.metrics(later)
            report.add(
                keys.metrics(lost), f"no such object, but a later step was trained: {metrics}"
            )
