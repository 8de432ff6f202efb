"""A walk over all names below a folder of a file store, including names of special files.

A walk never opens a file, visits each folder only once even if links lead to it, and always ends.
For an entry that cannot be an object, it yields the reason, so that a listing can report the entry
and continue.
"""

import os
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_Identity = tuple[int, int]
"""Device and inode of a folder."""


@dataclass(frozen=True)
class Named:
    """A name that a walk yields. Example: Named(path, 1834, 1e9, '')."""

    path: Path
    size: int
    """Size in bytes."""
    modified_s: float
    problem: str
    """Why this entry is not an object; empty for a regular file."""


def not_regular(mode: int) -> str:
    """Return why a file with this `st_mode` is not an object; empty for a regular file."""
    kinds = {
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFDIR: "a folder",
    }
    if stat.S_ISREG(mode):
        return ""
    return f"{kinds.get(stat.S_IFMT(mode), 'something else')}, expected a regular file; remove it"


def walk(root: Path, top: Path, follow: bool) -> Iterator[Named]:
    """Yield all names below a folder of the store, in no particular order.

    Folders are not yielded, except with a `problem`: unreadable folders, and folders that the walk
    reaches a second time.

    Args:
        root: The folder of the store.
        top: The folder to walk.
        follow: Whether to also walk folders to which links lead. They are walked last, so that a
            folder that also has a regular name in the store is listed under that name.
    """
    seen = _above(root) | _above(top)
    folders, links = deque([top]), deque[Path]()
    while folders or links:
        folder = folders.popleft() if folders else links.popleft()
        problem = _reached_again(folder, top, seen)
        try:
            entries = [] if problem else list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            continue  # the folder does not exist, or was removed meanwhile
        except OSError as error:
            entries, problem = [], f"a folder that cannot be read: {error.strerror}"
        if problem:
            yield Named(folder, 0, 0.0, problem)
        for entry in entries:
            path = Path(entry.path)
            try:
                status = entry.stat()
            except OSError as error:
                if entry.is_symlink():
                    problem = f"a link that leads nowhere: {error.strerror}; remove it"
                    yield Named(path, 0, 0.0, problem)
                continue  # an entry that is not a link was removed meanwhile
            if not stat.S_ISDIR(status.st_mode):
                problem = not_regular(status.st_mode)
                yield Named(path, status.st_size, status.st_mtime, problem)
            elif not entry.is_symlink():
                folders.append(path)
            elif follow:
                links.append(path)


def _reached_again(folder: Path, top: Path, seen: dict[_Identity, Path]) -> str:
    """Return why a folder that the walk reached before is not listed again.

    The text is empty if the walk reaches the folder for the first time.
    """
    identity = _identity(folder)
    if identity is None or folder == top:
        return ""
    first = seen.setdefault(identity, folder)
    return "" if first is folder else f"the same folder as {first}; remove the link"


def _above(folder: Path) -> dict[_Identity, Path]:
    """Return the folder and all folders that contain it, keyed by identity."""
    try:
        real = folder.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return {}
    found = {_identity(path): path for path in (real, *real.parents)}
    return {identity: path for identity, path in found.items() if identity is not None}


def _identity(folder: Path) -> _Identity | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
