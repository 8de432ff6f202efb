"""A full offline check: of each step every byte, every row, every join; of a run all its files.

What it finds is a list, not an exception: one bad object does not hide the next.
"""

import re

from pipeline.store import Store, keys
from pipeline.traces.problems import Report
from pipeline.traces.schema import parse_geometry
from pipeline.traces.verify_run import (
    find_signed,
    verify_attempts,
    verify_checkpoints,
    verify_inputs,
    verify_policies,
    verify_validations,
)
from pipeline.traces.verify_step import verify_step

_COMMIT = re.compile(r"steps/\d{6}/(rollout/|training/)?[^/]+\.json")


def verify(store: Store, step: int | None = None) -> Report:
    """Check a run or record set: all of it, or one step only."""
    report = Report(store.uri)
    run, geometry = None, None
    with report.noting(keys.run_json()):
        run = find_signed(store, keys.run_json())
        geometry = parse_geometry((run or {}).get("geometry"), keys.run_json())
    if step is not None:
        verify_step(store, step, geometry, report)
        return report
    commits = {info.key for info in store.list(keys.steps()) if _COMMIT.fullmatch(info.key)}
    for number in sorted({keys.folder_number(key) or 0 for key in commits}):
        verify_step(store, number, geometry, report)
    if run is not None:
        _verify_order(commits, report)
    if not any(problem.key == keys.run_json() for problem in report.problems):
        verify_inputs(store, run, report)
    verify_attempts(store, report)
    verify_policies(store, report)
    verify_checkpoints(store, report)
    verify_validations(store, report)
    return report


def _verify_order(commits: set[str], report: Report) -> None:
    """What must have been there before something else of a run was made."""
    for key in sorted(commits):
        step = keys.folder_number(key) or 0
        plan, earlier = keys.plan(step), keys.metrics(step - 1)
        if key == keys.rollout(step, 0) and plan not in commits:
            report.add(plan, f"no such object, but the step was rolled out: {key}")
        if step and key == keys.metrics(step) and earlier not in commits:
            report.add(earlier, f"no such object, but a later step was trained: {key}")
