"""Pruning, which removes the samples and routes of old steps.

A pruned step keeps its plan, its manifest with rows (ids, lengths, rewards, digests), its commits
and its metrics. The object steps/N/pruned.json lists the removed files. It is written first, so
that these files are not reported as missing. If a call is interrupted, the next call removes the
remaining files.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from pipeline.recorded import check_recorded
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, commit, find_commit, new_write_id
from pipeline.run.description import find_description
from pipeline.run.parse import typed
from pipeline.run.restarts import KEPT, restarts
from pipeline.store import ObjectMissingError, Store, StoreError, open_store
from pipeline.traces.format.manifest import is_pruned, open_manifest, sealed_steps
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.trainer import find_trainer_routes


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
        TraceError: A restart of the run would need one of the steps, the recorded set in the run's
            record_file lacks one of them or one of its files, or a step is not trained yet.
        ObjectMissingError: A step's manifest or commit is missing.
        CorruptObjectError: A step's commit is damaged, or names files outside the step's folder.
        StoreError: The store failed. After all other errors, nothing was removed.
    """
    steps = sealed_steps(store)
    chosen = steps[: max(0, len(steps) - keep_steps)]
    new = [step for step in chosen if not is_pruned(store, step)]
    _refuse_needed(store, steps, new, keep_steps)
    _refuse_unrecorded(store, new)
    every = [step for step in steps if step in chosen or is_pruned(store, step)]
    found = {step: data_files(store, step) for step in every}
    remaining = {step: _left(store, step, named) for step, named in found.items()}
    for step, left in remaining.items():
        if not dry_run:
            if not is_pruned(store, step):
                body = {"step": step, "data": sorted(found[step])}
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
    for step in new:
        try:
            check_recorded(store, target, step)
        except (StoreError, TraceError) as error:
            raise TraceError(
                f"step {step} is not complete in the recorded set {record_file}, and the run could "
                f"no longer write it there; let the run write it first, or keep the step: {error}"
            ) from error


def data_files(store: Store, step: int) -> set[str]:
    """Return the keys of the files with samples and routes that belong to a sealed step.

    These are the files that pruning removes: those of the manifest and of the trainer's routes.

    Raises:
        ObjectMissingError: The step's manifest or a commit is missing.
        CorruptObjectError: The step's commits name files outside the step's folder.
        StoreError: A commit cannot be read.
        TraceError: A commit is malformed, or the trainer's routes are missing.
    """
    if store.size(keys.manifest(step)) is None:  # it was removed since the steps were listed
        raise ObjectMissingError(
            f"{keys.manifest(step)} in {store.uri}: no such object, but a list of the store "
            "contained it; try again, or restore the object"
        )
    manifest = open_manifest(store, step).head
    trainer = find_trainer_routes(store, manifest)
    found = {file.key for file in (*manifest.files, *(trainer.files if trainer else ()))}
    outside = [key for key in found if not key.startswith(keys.step_prefix(step))]
    if outside:
        raise CorruptObjectError(f"step {step} in {store.uri}: it names {outside[0]}")
    return found


def check_pruned(body: Mapping[str, Any], step: int, expected: Set[str]) -> None:
    """Check the body of a step's pruned.json.

    Args:
        body: The body.
        step: The step.
        expected: The step's data files.

    Raises:
        CorruptObjectError: The body does not list exactly these files.
    """
    key = keys.pruned(step)
    try:
        names = set(typed(body, "data", list[str]))
    except ValueError as error:
        raise CorruptObjectError(f"{key}: {error}; restore the object") from error
    if strange := names - expected:
        raise CorruptObjectError(
            f"{key}: it names {min(strange)}, which is not a data file of step {step}; restore the "
            "object"
        )
    if absent := expected - names:
        raise CorruptObjectError(
            f"{key}: it does not name {min(absent)}, which is a data file of step {step}; restore "
            "the object"
        )


def _left(store: Store, step: int, named: Set[str]) -> dict[str, int]:
    """Return the sizes in bytes of a step's data files that still exist, keyed by object key."""
    body = find_commit(store, keys.pruned(step))
    if body is not None:
        check_pruned(body, step, named)
    sizes = {key: store.size(key) for key in named}
    return {key: size for key, size in sizes.items() if size is not None}
