"""Removal of debris, the files that no commit names.

Workers leave debris if they are killed, or if another worker commits first.

The commit that names a file may not have been written yet. Therefore only debris older than a limit
is removed; its age is measured with the store's own clock. All files with the same write id are
considered as old as the newest of them. Folders with an upload in progress are skipped.

Staged inputs can be debris only once run.json exists. Objects that were copied to or from a
recorded set keep their names, so a flow that restarts before their step is sealed still uses them.
They can be debris only once the step is sealed.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, find_commit, new_write_id, read_commit
from pipeline.store import ObjectInfo, Store, StoreError
from pipeline.upkeep.lost_commits import lost_manifests, lost_policies
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.others import staged_files

_MANIFEST, _METRICS, _PRUNED = "manifest.json", "metrics.json", "pruned.json"
_TRAINING_SET = "training.json"
_NAME_NOTHING = re.compile(r"plan(\.\d{5})?\.json|metrics\.json|pruned\.json")


@dataclass(frozen=True)
class Debris:
    """An object or upload that was removed, or would have been removed without `dry_run`."""

    key: str
    size: int
    """The size in bytes."""
    age_s: float
    """Seconds since the last write."""
    what: str
    """The kind of debris: 'no commit names it' or 'an unfinished upload'."""


def sweep(
    store: Store, older_than_s: float, report: Report, dry_run: bool = False
) -> Iterator[Debris]:
    """Remove the debris of a run or recorded set.

    If a commit is lost, is unreadable or names a missing file, the correct content of its folder is
    unknown. In that case, nothing in that folder is removed.

    Args:
        store: The run or recorded set.
        older_than_s: Minimum age, in seconds, of the debris to remove.
        report: Receives the problem with each folder that is not swept.
        dry_run: Whether to yield the debris without removing it.

    Yields:
        Each object or upload, as soon as it is removed.

    Raises:
        StoreError: The store failed.
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
"""A function that returns only the objects that are old enough to be removed."""


def _now_s(store: Store) -> float:
    """Return the current time according to the store's clock."""
    key = keys.clock(new_write_id())
    store.create(key, b"")
    infos = list(store.list(key))
    store.delete(key)
    if not infos:
        raise StoreError(
            f"list {key} in {store.uri}: no such object, expected the one that was just created; "
            "sweep needs a store whose lists contain each new object at once"
        )
    return infos[0].modified_s


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
    """Yield, folder by folder, the objects that are old enough and that no commit names."""
    yield from old(store.list(keys.clocks()))
    lost = _lost(store)
    in_set = store.size(keys.run_json()) is None
    for prefix in (keys.steps(), keys.validations(), keys.policies(), keys.checkpoints()):
        for folder, group in groupby(store.list(prefix), lambda info: _numbered(info.key)):
            infos = list(group)
            candidates = _candidates(folder, infos, old)
            if candidates and folder in lost:
                key, text = lost[folder]
                report.add(key, f"{text}; {folder} is not swept")
            elif not (in_set and _is_unsealed(folder, infos)):
                yield from _checked(store, folder, infos, candidates, report)
    yield from _unnamed_inputs(store, old, report)


def _lost(store: Store) -> dict[str, tuple[str, str]]:
    """Return the folders whose commit is lost, so that their files only look like debris.

    The values are the commit's key and a text that names an object that requires the commit.
    """
    there = [info.key for info in store.list(keys.steps())]
    found = {keys.manifest(step): text for step, text in lost_manifests(store, there).items()}
    found |= lost_policies(store)
    return {_numbered(key): (key, text) for key, text in found.items()}


def _candidates(folder: str, infos: Sequence[ObjectInfo], old: _Old) -> list[ObjectInfo]:
    """Return the old objects that are debris if no commit in the folder names them."""
    found = [info for info in infos if keys.maker_of(info.key) is not None]
    number = keys.folder_number(folder)
    if number is not None and any(info.key == keys.manifest(number) for info in infos):
        found += [info for info in infos if info.key.startswith(keys.replays(number))]
    return old(found)


def _is_unsealed(folder: str, infos: Iterable[ObjectInfo]) -> bool:
    """Return whether a folder belongs to a step without manifest."""
    is_step = folder.startswith(keys.steps())
    return is_step and all(info.key != folder + _MANIFEST for info in infos)


def _checked(
    store: Store,
    folder: str,
    infos: Sequence[ObjectInfo],
    candidates: Sequence[ObjectInfo],
    report: Report,
) -> list[ObjectInfo]:
    """Return the candidates that no commit in their folder names.

    The result is empty if a problem with the folder prevents a reliable answer.
    """
    left = {info.key: info for info in candidates}
    there = {info.key for info in infos}
    # In a pruned step, the files that the commits name are expected to be missing.
    pruned = folder + _PRUNED in there
    commits = [info.key for info in infos if _is_commit(info.key)]
    before = report.found
    _check_training(store, folder, there, list(left), report)
    if left and folder.startswith(keys.policies()):
        _check_base(store, folder, there, report)
    # The manifest is read first. It names most of a step's files, so other commits are rarely read.
    for key in sorted(commits, key=lambda key: key != folder + _MANIFEST):
        if not left:
            break
        with report.parsing(key):
            names = _names(store, key)
            lost = [] if pruned else [name for name in names - there if store.size(name) is None]
            if lost and store.size(key) is not None:  # a trainer may have just removed the policy
                raise CorruptObjectError(
                    f"{key}: it names {min(lost)}, which does not exist; {folder} is not swept"
                )
            for name in names:
                left.pop(name, None)
    return [] if report.found > before else list(left.values())


def _check_training(
    store: Store, folder: str, there: set[str], candidates: Sequence[str], report: Report
) -> None:
    """Report a trained step without training.json: its training files only look like debris."""
    if folder + _METRICS not in there or folder + _TRAINING_SET in there:
        return
    if any(key.startswith(folder + "training/") for key in candidates):
        with report.parsing(folder + _TRAINING_SET):
            if read_commit(store, folder + _MANIFEST).get("training"):
                raise CorruptObjectError(
                    f"{folder}{_TRAINING_SET}: no such object, but the step was trained; {folder} "
                    "is not swept"
                )


def _check_base(store: Store, folder: str, there: set[str], report: Report) -> None:
    """Report a policy that has no commit although the next version is a difference based on it."""
    number = keys.folder_number(folder)
    if number is None or (lost := keys.policy(number)) in there:
        return
    following = keys.policy(number + 1)
    with report.parsing(following):
        body = find_commit(store, following)
        # A trainer may have committed both versions since the folder was listed.
        if body is not None and "difference" in body and store.size(lost) is None:
            report.add(
                lost,
                f"no such object, but {following} is a difference from it; {folder} is not swept",
            )


def _unnamed_inputs(store: Store, old: _Old, report: Report) -> Iterator[ObjectInfo]:
    left = {info.key: info for info in old(store.list(keys.inputs()))}
    if not left:
        return
    before = report.found
    if store.size(keys.run_json()) is None:
        return
    with report.noting(keys.run_json()):
        for key, files in staged_files(store):
            for file in files:
                if file.key not in left and store.size(file.key) is None:
                    text = f"it names {file.key}, which does not exist"
                    report.add(key, f"{text}; {keys.inputs()} is not swept")
                left.pop(file.key, None)
    for info in store.list(keys.policies()) if left else ():
        if _is_commit(info.key):
            with report.parsing(info.key):
                for name in _names(store, info.key):
                    left.pop(name, None)
    if report.found == before:
        yield from left.values()


def _names(store: Store, key: str) -> set[str]:
    """Return the keys of the files, shares and commits that a commit object names."""
    if _NAME_NOTHING.fullmatch(key.rpartition("/")[2]):
        return set()
    body = find_commit(store, key)
    if body is None:  # removed since it was listed
        return set()
    lists = (body["files"], body.get("tensors", ()), body.get("data", ()))
    return {file["key"] for files in lists for file in files}


def _is_commit(key: str) -> bool:
    return key.endswith(".json") and keys.maker_of(key) is None


def _numbered(key: str) -> str:
    """Return the folder of a step or version, for example 'steps/000003/'."""
    return "/".join(key.split("/")[:2]) + "/"


def _folder(key: str) -> str:
    return key.rpartition("/")[0]
