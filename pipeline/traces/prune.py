"""Frees space: removes the samples and routes of old steps, and says so in steps/N/pruned.json.

What stays of a pruned step: plan, manifest with its rows (ids, lengths, rewards, digests), commits,
metrics. pruned.json comes first, so that nobody takes a file that is gone for lost; what an
interrupted call leaves goes with the next.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.store import Store, keys, open_store
from pipeline.store.commit import CorruptObjectError, commit, find_commit, new_attempt
from pipeline.store.restarts import restarts
from pipeline.traces.header import read_header
from pipeline.traces.manifest import sealed_steps
from pipeline.traces.records import TraceError
from pipeline.traces.training import training_headers


@dataclass(frozen=True)
class Pruned:
    """What a call removed of a step, or would."""

    step: int
    files: int
    size: int
    """Bytes."""


def is_pruned(store: Store, step: int) -> bool:
    """Whether a step's samples and routes were removed, or are being removed."""
    return store.size(keys.pruned(step)) is not None


def refuse_pruned(store: Store, step: int) -> None:
    """Raise TraceError when a step's samples and routes were removed."""
    if is_pruned(store, step):
        raise TraceError(
            f"step {step} of {store.uri}: its samples and routes were removed "
            f"({keys.pruned(step)}); its manifest and metrics are there"
        )


def prune(store: Store, keep_steps: int, dry_run: bool = False) -> Iterator[Pruned]:
    """Remove samples and routes of all sealed steps but the last `keep_steps`, oldest first.

    Yields each step as soon as it is done; a step of which nothing was left is not told. Raises
    TraceError, before anything is removed, when a restart of the run would need one of the steps
    or its record_file has not got it yet; CorruptObjectError when a commit does not say which files
    it names; StoreError.
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
                commit(store, keys.pruned(step), body, new_attempt())
            for key in left:
                store.delete(key)
        if left:
            yield Pruned(step, len(left), sum(left.values()))


def _refuse_needed(store: Store, steps: list[int], new: list[int], keep_steps: int) -> None:
    """A run's trainer trains again from a checkpoint on; a record set has none."""
    if not new or store.size(keys.run_json()) is None:
        return
    checkpoints = restarts(store)
    # As long as there are two, the newest may turn out to be damaged.
    first = checkpoints[-2:][0] if checkpoints else 0
    if new[-1] >= first:
        needed = sum(step >= first for step in steps)
        begin = f"the checkpoint of policy {first}" if checkpoints else "the first step"
        raise TraceError(
            f"--keep-steps {keep_steps}: a restart from {begin} needs the samples of step {first} "
            f"and all after it; keep at least {needed} steps"
        )


def _refuse_unrecorded(store: Store, new: list[int]) -> None:
    """A run writes its record_file step by step, an attached one what is missing."""
    run = find_commit(store, keys.run_json())
    record_file = None if run is None else _record_file(run)
    if record_file is None:
        return
    target = open_store(record_file)
    missing = [step for step in new if target.size(keys.manifest(step)) is None]
    if missing:
        raise TraceError(
            f"step {missing[0]}: router_replay.record_file {record_file} has not got it yet, and "
            "the run would fail to write it; let the run write it, or keep the step"
        )


def _record_file(run: Mapping[str, Any]) -> str | None:
    try:
        replay = run["config"]["actor_rollout_ref"]["actor"]["router_replay"]
        found = replay.get("record_file")
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptObjectError(f"{keys.run_json()}: not a run: {error!r}") from error
    return None if found is None else str(found)


def _left(store: Store, step: int) -> dict[str, int]:
    """Bytes by key of the data files of a step that are still there."""
    body = find_commit(store, keys.pruned(step))
    if body is None:
        named = {ref["key"] for ref in read_header(store, keys.manifest(step)).body["data"]}
        for header in training_headers(store, step):
            named |= {file.data.key for file in header.files}
    else:
        named = set(body["data"])
    outside = [key for key in named if not key.startswith(keys.step_prefix(step))]
    if outside:
        raise CorruptObjectError(f"step {step} in {store.uri}: it names {outside[0]}")
    sizes = {key: store.size(key) for key in named}
    return {key: size for key, size in sizes.items() if size is not None}
