"""Removing a whole run.

A mark comes first and goes last, so that a run whose removal was interrupted is recognised: it is
listed as half removed, nothing attaches to it, and removing it again completes the work.
"""

from pathlib import Path

from pipeline.errors import InputError
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from pipeline.store import open_store
from pipeline.store.schemes import remove_empty_folders
from pipeline.upkeep.run_list import ListedRun, find_run, missing_run


def removable_run(uri: str, force: bool = False) -> ListedRun:
    """The run at a folder or URI, if it may be removed; `force`: also one that may be at work.

    Raises InputError: no run there, or one at work as far as its records can tell; StoreError.
    """
    run = find_run(uri)
    if run is None or run.state in ("no run", "recorded set"):
        if (found := missing_run(uri)) is not None:
            raise InputError([f"{uri}: {found}"])
        found = "nothing" if run is None else f"{run.message or 'a recorded set'}"
        raise InputError(
            [
                f"{uri}: expected a run, found {found}; list runs with `retrace runs ls STORE`, "
                "and remove other things by the store's own tools"
            ]
        )
    if run.state == "running" and not force:
        raise InputError(
            [
                f"{uri}: the run is at work: its last attempt has not ended, and it wrote "
                "something not long ago; end it first (Ctrl-C, or cancel its flow run), or, if it "
                "was killed, remove it with --force"
            ]
        )
    return run


def remove_run(run: str | Path, force: bool = False) -> int:
    """Remove the run at a folder or URI with everything in it; return the freed bytes.

    `force` removes a run too whose records say that it is at work, as they do for a while after a
    kill -9; workers that are still there would write on. What was interrupted may be repeated.
    Raises InputError as above, StoreError.
    """
    uri = str(run)
    size = removable_run(uri, force).size
    store = open_store(uri)
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
