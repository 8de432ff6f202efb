"""Pruning, which removes the samples and routes of old steps.

A pruned step keeps its plan, its manifest with rows (ids, lengths, rewards, digests), its commits
and its metrics. The object steps/N/pruned.json lists the removed files. It is written first, so
that these files are not reported as missing. If a call is interrupted, the next call removes the
remaining files.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.run import keys
from pipeline.run.amendments import find_description
from pipeline.run.commit import CorruptObjectError, commit, find_commit, new_write_id
from pipeline.run.restarts import KEPT, restarts
from pipeline.store import Store, open_store
from pipeline.traces.format.header import read_header
from pipeline.traces.format.manifest import is_pruned, open_manifest, sealed_steps
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.training import find_training_set


@dataclass(frozen=True)
class Pruned:
    """The data files that a call removed from a step, or would have removed without `dry_run`."""

    step: int
    files: int
    size: int
    """The size of these files in bytes."""


def prune(store: Store, keep_steps: int, dry_run: bool = False) -> Iterator[Pruned]:
    """Remove the samples and routes of all sealed steps except the last `keep_steps`, oldest first.

    Args:
        store: The run or recorded set.
        keep_steps: Number of sealed steps to keep.
        dry_run: Whether to yield the steps without removing anything.

    Yields:
        The result for each step, as soon as the step's files are removed. Steps without files to
        remove are skipped.

    Raises:
        TraceError: A restart of the run would need one of the steps, or the recorded set in the
            run's record_file lacks one of them. In both cases, nothing was removed.
        CorruptObjectError: A step's commits name files outside the step's folder.
        StoreError: The store failed.
    """
    steps = sealed_steps(store)
    chosen = steps[: max(0, len(steps) - keep_steps)]
    new = [step for step in chosen if not is_pruned(store, step)]
    _refuse_needed(store, steps, new, keep_steps)
    _refuse_unrecorded(store, new)
    for step in [step for step in steps if step in chosen or is_pruned(store, step)]:
        left = _left(store, step)
        if not dry_run:
            if not is_pruned(store, step):
                body = {"step": step, "data": sorted(left)}
                commit(store, keys.pruned(step), body, new_write_id())
            for key in left:
                store.delete(key)
        if left:
            yield Pruned(step, len(left), sum(left.values()))


def _refuse_needed(store: Store, steps: list[int], new: list[int], keep_steps: int) -> None:
    """Refuse to remove steps that a restart from a checkpoint trains again."""
    if not new or store.size(keys.run_json()) is None:
        return
    checkpoints = restarts(store)
    # If the newest checkpoint is damaged, a restart begins at the previous one.
    first = checkpoints[-KEPT:][0] if checkpoints else 0
    if new[-1] >= first:
        needed = sum(step >= first for step in steps)
        begin = f"the checkpoint of policy {first}" if checkpoints else "the first step"
        raise TraceError(
            f"--keep-steps {keep_steps}: a restart from {begin} needs the samples of step {first} "
            f"and all later steps; keep at least {needed} steps"
        )


def _refuse_unrecorded(store: Store, new: list[int]) -> None:
    """Refuse to remove steps that the run has not yet written to its record_file."""
    run = find_description(store)
    record_file = None
    if run is not None:
        record_file = run.setting("actor_rollout_ref.actor.router_replay.record_file")
    if record_file is None:
        return
    target = open_store(str(record_file))
    missing = [step for step in new if target.size(keys.manifest(step)) is None]
    if missing:
        raise TraceError(
            f"step {missing[0]} is not in the recorded set {record_file} yet, and the run "
            "could no longer write it there; let the run write it first, or keep the step"
        )


def _left(store: Store, step: int) -> dict[str, int]:
    """Return the sizes in bytes of a step's data files that still exist, keyed by object key."""
    body = find_commit(store, keys.pruned(step))
    if body is None:
        named = {ref["key"] for ref in read_header(store, keys.manifest(step)).body["data"]}
        training = find_training_set(store, open_manifest(store, step).head)
        for header in () if training is None else training.commits:
            named |= {file.data.key for file in header.files}
    else:
        named = set(body["data"])
    outside = [key for key in named if not key.startswith(keys.step_prefix(step))]
    if outside:
        raise CorruptObjectError(f"step {step} in {store.uri}: it names {outside[0]}")
    sizes = {key: store.size(key) for key in named}
    return {key: size for key, size in sizes.items() if size is not None}
