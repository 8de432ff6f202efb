"""The runs of a store: what each is, how far it came, what it takes.

One listing of the store, and a few small reads for each run. Reads no settings tree, as users of
traces have none.
"""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import InputError
from pipeline.metrics.former import named_today
from pipeline.run import keys, parse
from pipeline.run.amendments import description_now
from pipeline.run.commit import find_commit, read_commit
from pipeline.store import ObjectInfo, Store, StoreError, open_store
from pipeline.store.schemes import DEFAULT_STORE
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
"""Running or killed: the newest attempt has no end. It is taken for killed once nothing was written
for longer than its time limits (launch.start_timeout_s, launch.step_timeout_s) allow."""

_RUN_OBJECT = re.compile(r"[^/]+/(run\.json|steps/\d{6}/manifest\.json)")
_TOTAL = "trainer.total_training_steps"
_REWARD = "critic/rewards/mean"
_LIMITS = ("start_timeout_s", "step_timeout_s")
"""Stored in an attempt: what waits for an object for longer gives up."""
_ENDS: dict[str, State] = {"finished": "finished", "failed": "failed", "cancelled": "cancelled"}


@dataclass(frozen=True)
class ListedRun:
    """A run of a store, or something else that lies among them."""

    name: str
    """Its folder in the store."""
    state: State
    message: str
    """Why it failed or was cancelled, what is damaged; empty: nothing to say."""
    finished_steps: int
    total_steps: int | None
    """As its newest attempt wants; None: not known."""
    reward: float | None
    """Mean of the last finished step; None: no step is finished, or no sample has a reward."""
    size: int
    """Bytes of all its objects."""
    created_s: float
    """Seconds since the epoch, as all times by the store's clock: its first object."""
    modified_s: float
    """Its last object."""


@dataclass
class _Folder:
    """What a listing shows of one folder of a store."""

    name: str
    size: int = 0
    first_s: float = float("inf")
    last_s: float = 0.0
    finished: int = 0
    newest_attempt: int | None = None
    has: set[str] = field(default_factory=set)
    """'run', 'removal', 'step': which of these objects were seen."""

    def add(self, info: ObjectInfo, key: str) -> None:
        """Take an object; they come in key order."""
        self.size += info.size
        self.first_s = min(self.first_s, info.modified_s)
        self.last_s = max(self.last_s, info.modified_s)
        if key == keys.metrics(self.finished):
            self.finished += 1
        elif key == keys.run_json():
            self.has.add("run")
        elif key == keys.removal():
            self.has.add("removal")
        elif (step := keys.number_of(key)) is not None and key == keys.manifest(step):
            self.has.add("step")
        elif (number := keys.attempt_number(key)) is not None:
            self.newest_attempt = max(number, self.newest_attempt or 0)


def list_runs(store: str | Path = DEFAULT_STORE) -> Iterator[ListedRun]:
    """What lies in the store of runs at a folder or URI, by name.

    What is damaged, or no run, is named with the reason. Raises InputError when a run, a recorded
    set or a file is there itself; StoreError when the store cannot be listed.
    """
    uri = str(store).rstrip("/")
    opened = open_store(uri)
    if (what := _no_store(uri, opened)) is not None:
        raise InputError([f"{uri}: {what}"])
    for folder in _folders(opened):
        yield _listed(f"{uri}/{folder.name}", folder)


def find_run(uri: str) -> ListedRun | None:
    """The run, or whatever else lies, at a folder or URI; None: there is no object.

    Raises StoreError when it cannot be listed.
    """
    folder = _Folder(uri.rstrip("/").rpartition("/")[2])
    for info in open_store(uri).list(""):
        folder.add(info, info.key)
    return _listed(uri, folder) if folder.last_s else None


def missing_run(uri: str) -> str | None:
    """What lies where a run is missing, and what to give instead; None: nothing that is known.

    It knows a store of runs and a settings file. Raises StoreError when it cannot be listed.
    """
    if Path(uri).suffix in (".yaml", ".yml") and Path(uri).is_file():
        return (
            f"found a settings file, expected a run; give its run, such as {DEFAULT_STORE}/NAME, "
            f"which `retrace check {uri}` names"
        )
    objects = (info.key for info in open_store(uri).list(""))
    names = sorted({key.split("/")[0] for key in objects if _RUN_OBJECT.fullmatch(key)})
    runs = [f"{uri.rstrip('/')}/{name}" for name in names]
    if len(runs) == 1:
        return f"a store of 1 run; give that one: {runs[0]}"
    return f"a store of {len(runs)} runs; give one of them: {', '.join(runs)}" if runs else None


def _no_store(uri: str, store: Store) -> str | None:
    """What lies at a place itself that was taken for a store of runs, and what to do."""
    if store.size(keys.run_json()) is not None:
        return f"a run, expected a store of runs; list its parent: retrace runs ls {_parent(uri)}"
    if sealed_steps(store):
        return f"a recorded set, expected a store of runs; list its steps: retrace traces ls {uri}"
    return "a file, expected a folder or URI that holds runs" if Path(uri).is_file() else None


def _parent(uri: str) -> str:
    if "://" in uri:
        return uri.rpartition("/")[0]
    folder = Path(uri)
    return str(folder.parent if folder.name not in ("", "..") else folder.resolve().parent)


def _folders(store: Store) -> Iterator[_Folder]:
    """The folders of a store, one at a time: their objects come in key order."""
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
        message=f"neither {keys.run_json()} nor a sealed step is there",
        finished_steps=folder.finished,
        total_steps=None,
        reward=None,
        size=folder.size,
        created_s=folder.first_s,
        modified_s=folder.last_s,
    )
    if "removal" in folder.has:
        return replace(found, state="half removed", message="its removal was interrupted")
    if "run" in folder.has:
        try:
            return _read(open_store(uri), folder, found)
        # A damaged run must not hide the others.
        except (StoreError, TypeError, ValueError) as error:
            return replace(found, state="damaged", message=str(error))
    return replace(found, state="recorded set", message="") if "step" in folder.has else found


def _read(store: Store, folder: _Folder, found: ListedRun) -> ListedRun:
    """The run, with what its small objects say. Raises StoreError, ValueError for damaged ones."""
    total = parse.number(description_now(store).setting(_TOTAL))
    reward = None
    if folder.finished:
        metrics = read_commit(store, keys.metrics(folder.finished - 1))
        reward = named_today(parse.field(metrics, "metrics", parse.numbers)).get(_REWARD)
    number = folder.newest_attempt
    if number is None:
        return replace(found, state="never started", message="", total_steps=total, reward=reward)
    attempt = read_commit(store, keys.attempt(number))
    state, message = _state(find_commit(store, keys.stop(number)), attempt, folder.last_s)
    return replace(
        found,
        state=state,
        message=message,
        # The stored name of a setting that may change with each start is its last part.
        total_steps=parse.number(attempt.get(_TOTAL.rpartition(".")[2], total)),
        reward=reward,
    )


def _state(
    stop: Mapping[str, Any] | None, attempt: Mapping[str, Any], last_s: float
) -> tuple[State, str]:
    """How an attempt is, or how it ended, and why."""
    if stop is not None:
        reason = parse.field(stop, "reason", parse.text)
        if reason not in _ENDS:
            raise ValueError(f"an attempt ended with reason {reason!r}, expected {set(_ENDS)}")
        return _ENDS[reason], str(stop.get("message", ""))
    limits = [parse.field(attempt, name, parse.real) for name in _LIMITS if name in attempt]
    quiet_s = time.time() - last_s
    if quiet_s > max(limits, default=0.0):
        return "killed", "it did not say that it ended, and nothing was written for too long"
    return "running", ""
