"""The full offline check of a run or recorded set.

It reads every object once: each file has the size and digest in its commit, opens with the normal
reader, and belongs to this run, step and place; manifests agree with plans and shards; no object
that another one requires is missing. Problems are collected in a report instead of being raised, so
one damaged object does not hide the problems in other objects. A forged object whose digests are
right is not its subject: who may write into a run's bucket is trusted (docs/design.md).
"""

import re
from itertools import pairwise

from pipeline.run import keys
from pipeline.run.description import RunDescription, read_created, run_digest
from pipeline.store import Store
from pipeline.upkeep.lost_commits import lost_manifests, lost_policies
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.one_step import verify_step
from pipeline.upkeep.verify.others import (
    verify_attempts,
    verify_checkpoints,
    verify_inputs,
    verify_policies,
    verify_validations,
)

__all__ = ["verify"]

_COMMIT = re.compile(r"steps/\d{6}/(rollout/)?[^/]+\.json")


def verify(store: Store, step: int | None = None) -> Report:
    """Check an entire run or recorded set, or only one step."""
    report = Report(store.uri)
    run, digest = _run(store, report)
    there = [info.key for info in store.list(keys.steps())]
    commits = {key for key in there if _COMMIT.fullmatch(key)}
    steps = sorted({keys.folder_number(key) or 0 for key in commits}) if step is None else [step]
    for number in steps:
        with report.noting(keys.manifest(number)):
            verify_step(store, number, run, digest, report)
    with report.noting(keys.run_json()):
        for number, text in lost_manifests(store, there).items():
            if number in steps:
                report.add(keys.manifest(number), text)
    if run is not None:
        _verify_order(commits, step, report)
    if step is not None:
        return report
    for prefix, check in (
        (keys.attempts(), verify_attempts),
        (keys.validations(), verify_validations),
        (keys.policies(), verify_policies),
        (keys.checkpoints(), verify_checkpoints),
    ):
        with report.noting(prefix):
            check(store, report)
    if run is not None:
        with report.noting(keys.run_json()):
            verify_inputs(store, report)
            for key, text in lost_policies(store).items():
                report.add(key, text)
    return report


def _run(store: Store, report: Report) -> tuple[RunDescription | None, str | None]:
    """Return a run's description and its digest; None and None for a set or a damaged run.json."""
    with report.noting(keys.run_json()):
        digest = run_digest(store)
        if digest is not None:
            return read_created(store), digest
        for prefix in (keys.inputs(), keys.attempts(), keys.policies()):
            for info in store.list(prefix):
                report.add(keys.run_json(), f"no such object, but {info.key} exists")
                return None, None
    return None, None


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
