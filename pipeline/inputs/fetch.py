"""Inputs in object storage, fetched to the flow's machine.

A flow in a pod has no folder with inputs, so prompts, the reward function and the model may be URIs
of remote stores. They are read with the same credentials and endpoint as the run's store.
"""

import functools
import hashlib
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from pipeline.errors import InputError
from pipeline.scratch import scratch_folder
from pipeline.store import ObjectMissingError, StoreError, is_remote, open_store
from pipeline.store.download import downloaded
from pipeline.store.schemes import REMOTE_URI


def local_file(key: str, place: str) -> Path:
    """The file at a path, or an object fetched to this machine once. Raises InputError."""
    if not is_remote(place):
        return Path(place).expanduser()
    parent, _, name = place.rpartition("/")
    return _fetch(key, parent, (name,)) / name


def remote_names(key: str, place: str, patterns: Sequence[str]) -> list[str]:
    """Names of the objects directly under a URI that match a pattern. Raises InputError."""
    try:
        found = [info.key for info in open_store(place).list("")]
    except StoreError as error:
        raise InputError([f"{key}: {place} cannot be listed: {error}"]) from error
    return sorted(name for name in found if any(fnmatch(name, pattern) for pattern in patterns))


def fetch_files(key: str, place: str, names: Sequence[str]) -> Path:
    """Fetch objects directly under a URI into a folder of this machine. Raises InputError."""
    return _fetch(key, place.rstrip("/"), tuple(names))


@functools.cache
def _fetch(key: str, place: str, names: tuple[str, ...]) -> Path:
    digest = hashlib.sha256(place.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), "retrace-inputs", digest)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        store = open_store(place)
        with scratch_folder("inputs") as scratch:
            for name in names:
                size = store.size(name)
                if size is None:
                    raise ObjectMissingError(f"there is no object {name} in {store.uri}")
                with downloaded(store, name, size, scratch / name):
                    pass  # its digest is not known beforehand
                # Moved once complete: what a killed flow leaves in scratch is removed later.
                (scratch / name).replace(folder / name)
    except ObjectMissingError as error:
        raise InputError(
            [f"{key}: {error}; write the {REMOTE_URI} of an object that exists"]
        ) from error
    except (StoreError, OSError) as error:
        raise InputError([f"{key}: {place} cannot be fetched: {error}"]) from error
    return folder
