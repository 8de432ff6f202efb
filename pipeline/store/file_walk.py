"""Walking a folder store: every name below a folder, whatever it turns out to be.

A walk never opens a file, follows links to folders once, and ends: what cannot be an object is
given with the reason, so that whoever lists objects can say so and go on.
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
    """A name below a folder that is no folder to walk. Example: Named(path, 1834, 1e9, '')."""

    path: Path
    size: int
    """Bytes."""
    modified_s: float
    problem: str
    """Why this is no object; empty for a regular file."""


def not_regular(mode: int) -> str:
    """Why a file of this mode (`st_mode`) is no object; empty for a regular file."""
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
    """Yield all names below `top`, a folder of the store at `root`, folders aside, in no order.

    `follow`: links to folders too, after everything else, so that a folder is listed under its own
    name if it has one. A folder that cannot be read, or is reached again, is given with a problem.
    """
    seen = _above(root) | _above(top)
    folders, links = deque([top]), deque[Path]()
    while folders or links:
        folder = folders.popleft() if folders else links.popleft()
        problem = _reached_again(folder, top, seen)
        try:
            entries = [] if problem else list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            continue  # nothing there, or removed meanwhile
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
                continue  # else removed meanwhile
            if not stat.S_ISDIR(status.st_mode):
                problem = not_regular(status.st_mode)
                yield Named(path, status.st_size, status.st_mtime, problem)
            elif not entry.is_symlink():
                folders.append(path)
            elif follow:
                links.append(path)


def _reached_again(folder: Path, top: Path, seen: dict[_Identity, Path]) -> str:
    """Why a folder is not listed here: it is, or will be, listed elsewhere; empty if it is not."""
    identity = _identity(folder)
    if identity is None or folder == top:
        return ""
    first = seen.setdefault(identity, folder)
    return "" if first is folder else f"the same folder as {first}; remove the link"


def _above(folder: Path) -> dict[_Identity, Path]:
    """A folder and all that hold it."""
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
