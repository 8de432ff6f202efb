"""Removes debris: what killed workers and losers of races left, and no commit names.

A file may be on its way into a commit while we look at it, so only what is older than a limit
goes, by the store's own clock. Everything that one attempt wrote is as old as its newest file, and
a folder that something is being uploaded to is left alone. Staged inputs can be told from debris
once run.json is there; objects taken over from a record set, whose names are not random, once
their step is sealed: until then a restarted flow goes on with them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pipeline.store import ObjectInfo, Store, keys
from pipeline.store.commit import CorruptObjectError, find_commit, new_attempt
from pipeline.traces.header import read_header
from pipeline.traces.problems import Report
from pipeline.traces.verify_run import staged_files

_MANIFEST, _PRUNED = "manifest.json", "pruned.json"
_NAME_NOTHING = {"plan.json", "metrics.json", _PRUNED}
_TAKEN_OVER = re.compile(r"steps/\d{6}/replay/")
"""Commits copied from a record set: they name the set's files. The manifest names the copies."""


@dataclass(frozen=True)
class Debris:
    """Something that was removed, or would be."""

    key: str
    size: int
    """Bytes."""
    age_s: float
    """Since it was last written to."""
    what: str
    """'no commit names it' or 'an unfinished upload'."""


def sweep(
    store: Store, older_than_s: float, report: Report, dry_run: bool = False
) -> Iterator[Debris]:
    """Remove the debris of a run or record set that is older than a limit, and say what it was.

    Where a commit cannot be read, or names a file that is not there, nobody knows what its folder
    should hold: nothing of that folder goes, and `report` gets the problem. `dry_run` removes
    nothing. Raises StoreError.
    """
    now_s = _now_s(store)
    busy = set()
    for info in store.debris(""):
        age_s = now_s - info.modified_s
        if age_s < older_than_s:
            busy.add(_folder(info.key))
            continue
        if not dry_run:
            store.discard(info)
        yield Debris(info.key, info.size, age_s, "an unfinished upload")
    for info in _unnamed(store, lambda infos: _old(infos, now_s - older_than_s, busy), report):
        if not dry_run:
            store.delete(info.key)
        yield Debris(info.key, info.size, now_s - info.modified_s, "no commit names it")


_Old = Callable[[Iterable[ObjectInfo]], list[ObjectInfo]]
"""Those of a folder's objects that are old enough."""


def _now_s(store: Store) -> float:
    """The store's time."""
    key = keys.clock(new_attempt())
    store.create(key, b"")
    (info,) = store.list(key)
    store.delete(key)
    return info.modified_s


def _old(infos: Iterable[ObjectInfo], before_s: float, busy: set[str]) -> list[ObjectInfo]:
    newest: dict[str, float] = {}
    mine = list(infos)
    for info in mine:
        made = keys.maker_of(info.key) or info.key
        newest[made] = max(newest.get(made, info.modified_s), info.modified_s)
    return [
        info
        for info in mine
        if newest[keys.maker_of(info.key) or info.key] <= before_s and _folder(info.key) not in busy
    ]


def _unnamed(store: Store, old: _Old, report: Report) -> Iterator[ObjectInfo]:
    """Objects that are old enough and that no commit names, folder by folder."""
    yield from old(store.list(keys.clocks()))
    for prefix in (keys.steps(), keys.validations(), keys.policies(), keys.checkpoints()):
        for folder, group in groupby(store.list(prefix), lambda info: _numbered(info.key)):
            infos = list(group)
            yield from _checked(store, folder, infos, _candidates(folder, infos, old), report)
    yield from _unnamed_inputs(store, old, report)


def _candidates(folder: str, infos: Sequence[ObjectInfo], old: _Old) -> list[ObjectInfo]:
    """What may be debris if no commit of the folder names it."""
    found = [info for info in infos if keys.maker_of(info.key) is not None]
    number = keys.folder_number(folder)
    if number is not None and any(info.key == keys.manifest(number) for info in infos):
        found += [info for info in infos if info.key.startswith(keys.replays(number))]
    return old(found)


def _checked(
    store: Store,
    folder: str,
    infos: Sequence[ObjectInfo],
    candidates: Sequence[ObjectInfo],
    report: Report,
) -> list[ObjectInfo]:
    """The candidates that no commit of their folder names; none when that is not sure."""
    left = {info.key: info for info in candidates}
    there = {info.key for info in infos}
    # What the commits of a pruned step name is not there, and none of it is debris; of a sealed one
    # only what its manifest names must be: a record set has no routes that nobody replays.
    pruned, sealed = folder + _PRUNED in there, folder + _MANIFEST in there
    commits = [info.key for info in infos if _is_commit(info.key)]
    before = len(report.problems)
    # The manifest of a step names most of it: its other commits are seldom read.
    for key in sorted(commits, key=lambda key: key != folder + _MANIFEST):
        if not left:
            break
        with report.parsing(key):
            names = _names(store, key)
            optional = pruned or (sealed and "/rollout/" in key)
            lost = [] if optional else [name for name in names - there if store.size(name) is None]
            if lost and store.size(key) is not None:  # a trainer removes policies meanwhile
                raise CorruptObjectError(
                    f"{key}: it names {min(lost)}, which is not there; {folder} is not swept"
                )
            for name in names:
                left.pop(name, None)
    return [] if len(report.problems) > before else list(left.values())


def _unnamed_inputs(store: Store, old: _Old, report: Report) -> Iterator[ObjectInfo]:
    left = {info.key: info for info in old(store.list(keys.inputs()))}
    if not left:
        return
    before = len(report.problems)
    with report.parsing(keys.run_json()):
        run = find_commit(store, keys.run_json())
        if run is None:
            return
        for file in staged_files(run):
            if file.key not in left and store.size(file.key) is None:
                raise CorruptObjectError(
                    f"{keys.run_json()}: it names {file.key}, which is not there; "
                    f"{keys.inputs()} is not swept"
                )
            left.pop(file.key, None)
    for info in store.list(keys.policies()) if left else ():
        if _is_commit(info.key):
            with report.parsing(info.key):
                for name in _names(store, info.key):
                    left.pop(name, None)
    if len(report.problems) == before:
        yield from left.values()


def _names(store: Store, key: str) -> set[str]:
    """Keys of the files and commits that a commit object names."""
    if key.rpartition("/")[2] in _NAME_NOTHING or _TAKEN_OVER.match(key):
        return set()
    body: dict[str, Any] | None
    if key.startswith(keys.steps()):
        body = read_header(store, key).body  # checked against its own digest
    else:
        body = find_commit(store, key)
    if body is None:  # removed since it was listed
        return set()
    named = {file["key"] for file in body["files"]}
    return named.union(*({ref["key"], ref["commit"]} for ref in body.get("data", ())))


def _is_commit(key: str) -> bool:
    return key.endswith(".json") and keys.maker_of(key) is None


def _numbered(key: str) -> str:
    """The folder of a step or version: 'steps/000003/'."""
    return "/".join(key.split("/")[:2]) + "/"


def _folder(key: str) -> str:
    return key.rpartition("/")[0]
