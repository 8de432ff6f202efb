"""Inputs that lie in object storage, brought to the flow's machine.

A flow in a pod has no folder of its own: prompts, the reward function and the model may be named by
s3:// URIs. They are read with the same credentials and endpoint as the run's store.
"""

import functools
import hashlib
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from pipeline.config.errors import InputError
from pipeline.store import ObjectMissingError, Store, StoreError, open_store

_PIECE = 64 << 20


def is_remote(place: str) -> bool:
    """Whether a place is an s3:// URI and no path of this machine."""
    return place.startswith("s3://")


def local_file(key: str, place: str) -> Path:
    """The file at a path, or an object fetched to this machine once. Raises InputError."""
    if not is_remote(place):
        return Path(place).expanduser()
    parent, _, name = place.rpartition("/")
    return _fetch(key, parent, (name,)) / name


def remote_names(key: str, place: str, patterns: Sequence[str]) -> list[str]:
    """Names of the objects right under a URI that match a pattern. Raises InputError."""
    try:
        found = [info.key for info in open_store(place).list("")]
    except StoreError as error:
        raise InputError([f"{key}: {place} cannot be listed: {error}"]) from error
    return sorted(name for name in found if any(fnmatch(name, pattern) for pattern in patterns))


def fetch_files(key: str, place: str, names: Sequence[str]) -> Path:
    """Fetch objects right under a URI into a folder of this machine. Raises InputError."""
    return _fetch(key, place.rstrip("/"), tuple(names))


@functools.cache
def _fetch(key: str, place: str, names: tuple[str, ...]) -> Path:
    digest = hashlib.sha256(place.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), "retrace-inputs", digest)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        store = open_store(place)
        for name in names:
            _download(store, name, folder / name)
    except ObjectMissingError as error:
        raise InputError(
            [f"{key}: {error}; write the s3:// URI of an object that exists"]
        ) from error
    except (StoreError, OSError) as error:
        raise InputError([f"{key}: {place} cannot be fetched: {error}"]) from error
    return folder


def _download(store: Store, name: str, path: Path) -> None:
    size = store.size(name)
    if size is None:
        raise ObjectMissingError(f"there is no object {name} in {store.uri}")
    with path.open("wb") as file:
        for offset in range(0, size, _PIECE):
            file.write(store.read_range(name, offset, min(_PIECE, size - offset)))
