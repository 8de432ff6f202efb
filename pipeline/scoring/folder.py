"""The files that a reward file uses from its own folder; they are staged with it.

These are, for the reward file and then for each module found: the modules that it imports, packages
with all their files, and, if it reads `__file__`, the files whose relative paths are text constants
in its code. The code is not run.
"""

import re
import sys
from dataclasses import dataclass, field

from pipeline.errors import InputError
from pipeline.scoring.source import is_installed, uses_of
from pipeline.store import ObjectInfo, Store, StoreError, open_store

MOST_FILES = 1_000
MOST_BYTES = 8 << 20

_PATH = re.compile(r"(?:\./)?([\w-][\w.-]*(?:/[\w-][\w.-]*)*\.\w{1,8})", re.ASCII)
"""A text that may be the relative path of a file."""


def with_neighbours(key: str, place: str, name: str, content: bytes) -> dict[str, bytes]:
    """Return a reward file and the files that it uses from its folder.

    Args:
        key: The setting that names the reward file, for messages.
        place: The path or URI of the reward file's folder.
        name: The reward file's name.
        content: The reward file's content.

    Returns:
        The contents, keyed by path relative to the folder; the reward file is the first.

    Raises:
        InputError: The files cannot be read, or there are more than MOST_FILES or MOST_BYTES.
    """
    try:
        return _Folder(key, open_store(place), {name: content}).fill()
    except StoreError as error:
        raise InputError(
            [f"{key}: the files next to the reward file cannot be read: {error}"]
        ) from error


@dataclass
class _Folder:
    """The folder of a reward file, and the contents of the files found so far."""

    key: str
    store: Store
    found: dict[str, bytes]
    _size: int = 0
    _seen: set[str] = field(default_factory=set)

    def fill(self) -> dict[str, bytes]:
        """Add files until no found file uses others."""
        waiting = list(self.found)
        self._size = sum(map(len, self.found.values()))
        while waiting:
            uses = uses_of(self.found[waiting.pop()])
            for name in sorted(uses.modules - sys.stdlib_module_names - self._seen):
                self._seen.add(name)
                waiting += [one for one in self._module(name) if one.endswith(".py")]
            for text in sorted(uses.texts - self._seen):
                self._seen.add(text)
                path = _PATH.fullmatch(text)
                if path and (size := self.store.size(path[1])) is not None:
                    waiting += [one for one in self._add(path[1], size) if one.endswith(".py")]
        return self.found

    def _module(self, name: str) -> list[str]:
        """Add a module of the folder, if there is one, and return the names of the new files."""
        init = self.store.size(f"{name}/__init__.py")
        if init is None and (size := self.store.size(f"{name}.py")) is not None:
            return self._add(f"{name}.py", size)
        if init is None and is_installed(name):
            return []
        inside = {one.key: one.size for one in self.store.list(f"{name}/") if _counts(one)}
        if not any(path.endswith(".py") for path in inside):
            return []
        return [new for path, size in inside.items() for new in self._add(path, size)]

    def _add(self, path: str, size: int) -> list[str]:
        if path in self.found:
            return []
        self._size += size
        if self._size > MOST_BYTES or len(self.found) >= MOST_FILES:
            raise InputError(
                [
                    f"{self.key}: the files that the reward file uses from its folder have more "
                    f"than {MOST_BYTES >> 20} MiB, or are more than {MOST_FILES}, with {path} "
                    f"({size} bytes); move what the reward function does not need out of the "
                    "package, or install the package for the workers"
                ]
            )
        self.found[path] = self.store.read(path, MOST_BYTES)
        return [path]


def _counts(file: ObjectInfo) -> bool:
    """Return whether a file of a package is staged: not if it is hidden or compiled."""
    parts = file.key.split("/")
    hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
    return not (hidden or file.key.endswith((".pyc", ".pyo")))
