"""The runs of a store: their states, progress and sizes.

The store is listed once, and a few small objects of each run are read. This module does not use the
settings tree, because an installation that only reads traces lacks the packages for it.
"""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import InputError
from pipeline.run import keys
from pipeline.run.commit import find_commit, find_commit_of, read_commit
from pipeline.run.description import description_now
from pipeline.run.owner import owner_of, runs_here
from pipeline.run.parse import Count, convert, typed
from pipeline.run.restarts import count_finished
from pipeline.store import ObjectInfo, Store, StoreError, open_store
from pipeline.store.schemes import DEFAULT_STORE
from pipeline.traces import TraceError
from pipeline.traces.format.manifest import sealed_steps

State = Literal[
    "running",
    "finished",
    "failed",
    "cancelled",
    "killed",
    "never started",
    "half removed",
    "recorded set",
    "damaged",
    "no run",
]
"""The state of a run or folder. In the states "running" and "killed", the newest attempt has no
stop object. A run is treated as killed if its process on this machine has ended, or if an owner on
another machine has written nothing for _SILENT_S seconds, not even a sign of life. The limit for a
flow run is the longer of its time limits (launch.start_timeout_s and launch.step_timeout_s)."""

_RUN_OBJECT = re.compile(r"[^/]+/(run\.json|steps/\d{6}/manifest\.json)")
_SILENT_S = 300.0
"""Much longer than the time between two signs of life, because clocks may differ."""
_TOTAL = "trainer.total_training_steps"
_REWARD = "critic/rewards/mean"
_LIMITS = ("start_timeout_s", "step_timeout_s")
"""Settings that an attempt stores: the time limits for waiting for an object."""
_ENDS: dict[str, State] = {"finished": "finished", "failed": "failed", "cancelled": "cancelled"}


class NoRunError(TraceError):
    """There is no run at this location; it may not have been created yet."""


@dataclass(frozen=True)
class ListedRun:
    """A run in a store, or a folder next to the runs that is not a run."""

    name: str
    """The name of its folder in the store."""
    state: State
    message: str
    """The reason for a failure or cancellation, or the damage; may be empty."""
    finished_steps: int
    total_steps: int | None
    """The total number of steps that its newest attempt sets; None if the number is unknown."""
    reward: float | None
    """Mean reward of the last finished step; None if no step is finished or no reward is known."""
    size: int
    """The total size of all its objects in bytes."""
    created_s: float
    """When its first object was written, in seconds since the epoch, according to the store's
    clock."""
    modified_s: float
    """When its last object was written, in the same unit and according to the same clock."""


@dataclass
class _Folder:
    """The result of listing one folder of a store."""

    name: str
    size: int = 0
    first_s: float = float("inf")
    last_s: float = 0.0
    trained: list[int] = field(default_factory=list)
    """The steps that have metrics, in ascending order."""
    newest_attempt: int | None = None
    has: set[str] = field(default_factory=set)
    """The kinds of objects that were listed: any of 'run', 'removal' and 'step'."""

    def add(self, info: ObjectInfo, key: str) -> None:
        """Count an object. Callers must add the objects in key order."""
        self.size += info.size
        self.first_s = min(self.first_s, info.modified_s)
        self.last_s = max(self.last_s, info.modified_s)
        step = keys.folder_number(key)
        if step is not None and key == keys.metrics(step):
            self.trained.append(step)
        elif key == keys.run_json():
            self.has.add("run")
        elif key == keys.removal():
            self.has.add("removal")
        elif step is not None and key == keys.manifest(step):
            self.has.add("step")
        elif (number := keys.attempt_number(key)) is not None:
            self.newest_attempt = max(number, self.newest_attempt or 0)


def list_runs(store: str | Path = DEFAULT_STORE) -> Iterator[ListedRun]:
    """Yield the runs and other folders in the store at a folder or URI, sorted by name.

    Folders that are not runs, and damaged runs, are included with a message. Raises InputError if
    the place is itself a run, a recorded set or a file. Raises StoreError if listing fails, or if
    the place is neither a path nor a valid URI.
    """
    opened = open_store(store)
    uri = str(store).rstrip("/")
    if (what := _no_store(uri, opened)) is not None:
        raise InputError([f"{uri}: {what}"])
    for folder in _folders(opened):
        yield _listed(f"{uri}/{folder.name}", folder)


def find_run(uri: str) -> ListedRun | None:
    """Return the run or other folder at a path or URI; None if nothing is stored there.

    Raises StoreError if listing fails.
    """
    folder = _Folder(uri.rstrip("/").rpartition("/")[2])
    for info in open_store(uri).list(""):
        folder.add(info, info.key)
    return _listed(uri, folder) if folder.last_s else None


def missing_run(uri: str) -> str | None:
    """Describe what exists at a place that is not a run, and give a fix.

    Returns None unless the place is a store of runs or a settings file. Raises StoreError if
    listing fails.
    """
    if Path(uri).suffix in (".yaml", ".yml") and Path(uri).is_file():
        return (
            f"found a settings file, expected a run; pass its run, such as {DEFAULT_STORE}/NAME, "
            f"which `retrace check {uri}` prints"
        )
    objects = (info.key for info in open_store(uri).list(""))
    names = sorted({key.split("/")[0] for key in objects if _RUN_OBJECT.fullmatch(key)})
    runs = [f"{uri.rstrip('/')}/{name}" for name in names]
    if len(runs) == 1:
        return f"a store of 1 run; pass that run: {runs[0]}"
    return f"a store of {len(runs)} runs; pass one of them: {', '.join(runs)}" if runs else None


def _no_store(uri: str, store: Store) -> str | None:
    """Return why a place is not a store of runs, with a fix; None if it may be one."""
    if store.size(keys.run_json()) is not None:
        return f"a run, expected a store of runs; list its parent: retrace runs ls {_parent(uri)}"
    if sealed_steps(store):
        return f"a recorded set, expected a store of runs; list its steps: retrace traces ls {uri}"
    return "a file, expected a folder or URI with runs" if Path(uri).is_file() else None


def _parent(uri: str) -> str:
    if "://" in uri:
        return uri.rpartition("/")[0]
    folder = Path(uri)
    return str(folder.parent if folder.name not in ("", "..") else folder.resolve().parent)


def _folders(store: Store) -> Iterator[_Folder]:
    """Yield a store's folders one at a time.

    The store lists objects in key order, so the objects of a folder are next to each other.
    """
    folder: _Folder | None = None
    for info in store.list(""):
        name, _, key = info.key.partition("/")
        if folder is None or folder.name != name:
            if folder is not None:
                yield folder
            folder = _Folder(name)
        folder.add(info, key)
    if folder is not None:
        yield folder


def _listed(uri: str, folder: _Folder) -> ListedRun:
    found = ListedRun(
        name=folder.name,
        state="no run",
        message=f"no {keys.run_json()} and no sealed step",
        finished_steps=max(folder.trained, default=-1) + 1,
        total_steps=None,
        reward=None,
        size=folder.size,
        created_s=folder.first_s,
        modified_s=folder.last_s,
    )
    if "removal" in folder.has:
        return replace(found, state="half removed", message="its removal was interrupted")
    if "run" not in folder.has and "step" in folder.has:
        return replace(found, state="recorded set", message="")
    try:
        store = open_store(uri)
        if "run" in folder.has:
            found = _read(store, folder, found)
        # A run that was refused before its inputs were staged has only an attempt.
        if (number := folder.newest_attempt) is not None:
            found = _read_attempt(store, folder, number, found)
    # A damaged run must not hide the other runs.
    except (StoreError, TypeError, ValueError) as error:
        return replace(found, state="damaged", message=str(error))
    return found


def _read(store: Store, folder: _Folder, found: ListedRun) -> ListedRun:
    """Return `found` with the values from a run's description and its last step's metrics.

    Raises StoreError or ValueError if one of these objects is damaged.
    """
    total = convert(description_now(store).setting(_TOTAL), Count)
    reward = None
    if finished := count_finished(store, folder.trained):
        step = finished - 1
        metrics = find_commit_of(store, keys.metrics(step), {"step": step}) or {}
        reward = typed(metrics, "metrics", dict[str, float | None]).get(_REWARD)
    return replace(found, state="never started", message="", total_steps=total, reward=reward)


def _read_attempt(store: Store, folder: _Folder, number: int, found: ListedRun) -> ListedRun:
    """Return `found` with the values from the newest attempt. Raises StoreError or ValueError."""
    attempt = read_commit(store, keys.attempt(number))
    attempted = parse_total(attempt)
    state, message = _state(find_commit(store, keys.stop(number)), attempt, folder.last_s)
    total = found.total_steps if attempted is None else attempted
    return replace(found, state=state, message=message, total_steps=total)


def parse_stop(stop: Mapping[str, Any]) -> tuple[State, str]:
    """Parse an attempt's stop object: how the attempt ended, and a message. Raises ValueError."""
    reason = typed(stop, "reason", str)
    if reason not in _ENDS:
        raise ValueError(f"an attempt ended with reason {reason!r}, expected {set(_ENDS)}")
    return _ENDS[reason], str(stop.get("message", ""))


def parse_total(attempt: Mapping[str, Any]) -> int | None:
    """Return the number of steps that an attempt sets; None if it sets none. Raises ValueError."""
    # An attempt stores a setting under the last part of the setting's key.
    name = _TOTAL.rpartition(".")[2]
    return typed(attempt, name, Count) if name in attempt else None


def parse_limit(attempt: Mapping[str, Any]) -> float:
    """Return the longer of an attempt's time limits, in seconds. Raises ValueError."""
    limits = [typed(attempt, name, float) for name in _LIMITS if name in attempt]
    if min(limits, default=0.0) < 0:
        raise ValueError(f"an attempt has the time limit {min(limits)} s, expected at least 0")
    return max(limits, default=0.0)


def _state(
    stop: Mapping[str, Any] | None, attempt: Mapping[str, Any], last_s: float
) -> tuple[State, str]:
    """Return the state of the newest attempt, and the reason why the attempt ended."""
    if stop is not None:
        return parse_stop(stop)
    owner = owner_of(attempt)
    here = None if owner is None else runs_here(owner)
    if here is not None:
        return ("running", "") if here else ("killed", f"{owner} has ended without a stop object")
    # Prefect may replace the pod of a flow run after a while.
    limit_s = _SILENT_S if owner and owner.flow_run is None else parse_limit(attempt)
    if time.time() - last_s > limit_s:
        return "killed", "its last attempt has no stop object, and nothing was written for too long"
    return "running", ""
