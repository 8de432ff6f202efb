"""Removal of runs.

An object that marks the removal is written first and removed last. Therefore, a run whose removal
was interrupted is listed as half removed, no flow attaches to it, and removing the run again
completes the removal.
"""

from pathlib import Path

from pipeline.errors import InputError
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from pipeline.store import open_store
from pipeline.store.schemes import remove_empty_folders
from pipeline.upkeep.run_list import ListedRun, find_run, missing_run


def removable_run(uri: str, force: bool = False) -> ListedRun:
    """Return the run at a folder or URI if it may be removed.

    With `force`, a run may be removed even if its records show that it is in progress. Raises
    StoreError, and raises InputError if no run exists there or if the run may not be removed.
    """
    run = find_run(uri)
    if run is None or run.state in ("no run", "recorded set"):
        if (found := missing_run(uri)) is not None:
            raise InputError([f"{uri}: {found}"])
        found = "nothing" if run is None else f"{run.message or 'a recorded set'}"
        raise InputError(
            [
                f"{uri}: expected a run, found {found}; list runs with `retrace runs ls STORE`, "
                "and remove other things with the store's own tools"
            ]
        )
    if run.state == "running" and not force:
        raise InputError(
            [
                f"{uri}: the run is in progress: its last attempt has not ended, and wrote objects "
                "recently; end it first (Ctrl-C, or cancel its flow run), or, if it "
                "was killed, remove it with --force"
            ]
        )
    return run


def remove_run(run: str | Path, force: bool = False) -> int:
    """Remove the run at a folder or URI with all its objects; return the number of freed bytes.

    With `force`, a run is removed even if its records show that it is in progress, as they do for a
    while after the run was killed with SIGKILL. Workers that are still running would continue to
    write objects. An interrupted removal may be repeated. Raises InputError like `removable_run`,
    and StoreError.
    """
    store = open_store(run)
    uri = str(run)
    size = removable_run(uri, force).size
    commit(store, keys.removal(), {}, new_write_id())
    last = (keys.run_json(), keys.removal())
    for info in list(store.list("")):
        if info.key not in last:
            store.delete(info.key)
    for unfinished in list(store.debris("")):
        store.discard(unfinished)
        size += unfinished.size
    for key in last:
        store.delete(key)
    remove_empty_folders(uri)
    return size
