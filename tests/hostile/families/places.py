"""Entries other than regular files in place of objects, and links in place of folders."""

import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.run import keys
from tests.hostile.case import FREE, NAMED, Case, Changes, Place, title
from tests.hostile.families.moved import may_be_absent
from tests.hostile.worlds import twin, world

_HUGE = 20 << 30


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's address must be short
    try:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path.name)
        listening.close()
    finally:
        os.chdir(here)


def _link(to: str) -> Place:
    return lambda path: path.symlink_to(to)


def _loop(path: Path) -> None:
    other = path.with_name("other-link")
    other.symlink_to(path.name)
    path.symlink_to(other.name)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(_HUGE)


def _folder(path: Path) -> None:
    path.mkdir()


def _full_folder(path: Path) -> None:
    path.mkdir()
    (path / "x.json").write_bytes(b"{}")


def _to_folder(path: Path) -> None:
    path.symlink_to(path.parent)


def _to_fifo(path: Path) -> None:
    fifo = path.with_name("other-fifo")
    os.mkfifo(fifo)
    path.symlink_to(fifo.name)


PLACES: dict[str, Place] = {
    "FIFO": _fifo,
    "link to a FIFO": _to_fifo,
    "socket": _socket,
    "link to dev zero": _link("/dev/zero"),
    "link to dev null": _link("/dev/null"),
    "link to dev stdin": _link("/dev/stdin"),
    "link to proc self mem": _link("/proc/self/mem"),
    "dangling link": _link("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "loop of links": _loop,
    "sparse 20 GB": _sparse,
    "folder": _folder,
    "folder with an object": _full_folder,
    "link to its folder": _to_folder,
    "empty": lambda path: path.write_bytes(b"") and None,
}

FOLDERS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "loop below steps": ("steps/loop", lambda path: path.symlink_to(".."), FREE),
    "loop in a step": ("steps/000000/rollout/loop", lambda path: path.symlink_to("../.."), FREE),
    "link to itself below steps": ("steps/000009", lambda path: path.symlink_to("000009"), FREE),
    "link to the root": ("steps/000008", lambda path: path.symlink_to("/"), FREE),
    "FIFO as a step": ("steps/000007", _fifo, FREE),
    "FIFO that no object names": ("steps/000000/rollout/x.json", _fifo, FREE),
    "device that no object names": ("steps/000000/x.json", _link("/dev/zero"), FREE),
    "sparse file that no object names": ("steps/000000/rollout/x.parquet", _sparse, FREE),
    "FIFO as a folder": ("validations/000009", _fifo, FREE),
}
"""Odd entries next to the objects of a step. Readers ignore them and still find the step."""


def cases(name: str) -> Iterator[Case]:
    """Yield cases with each odd entry in place of an object of each kind, and the FOLDERS cases."""
    kinds: dict[str, str] = {}
    for key in sorted(world(name)):
        if key.startswith(("steps/000000/", "run.json", "attempts/", "policies/", "validations/")):
            kinds.setdefault(_kind(key), key)
    for key in kinds.values():
        for what, place in PLACES.items():
            yield Case(
                f"places/{name}:{title(key)}/{what}/L0",
                name,
                lambda key=key, place=place: {key: place},
                FREE if _optional(key) or _lost(name, key, what) else NAMED,
            )
    for what, (key, place, expect) in FOLDERS.items():
        yield Case(
            f"places/{name}:{key}/{what}/L0",
            name,
            lambda key=key, place=place: {key: place},
            expect,
        )
    if name in ("r3", "r2"):
        yield from _linked(name)


def _linked(name: str) -> Iterator[Case]:
    """Yield cases in which a folder is replaced by a link to another folder.

    Readers either check the contents of that folder or refuse the link.
    """
    folders = ["steps/000000/rollout"] + (["steps/000000/training"] if name == "r2" else [])
    for folder in folders:
        yield Case(
            f"places/{name}:{folder}/link to a copy/L0",
            name,
            lambda folder=folder: _elsewhere(name, folder, world(name)),
            FREE,
        )
        yield Case(
            f"places/{name}:{folder}/link to another run's/L0",
            name,
            lambda folder=folder: _elsewhere(name, folder, twin(name, True)),
        )
        yield Case(
            f"places/{name}:{folder}/link to damaged copies/L0",
            name,
            lambda folder=folder: _elsewhere(
                name, folder, {key: data[:-9] for key, data in world(name).items()}
            ),
        )


def _elsewhere(name: str, folder: str, there: dict[str, bytes]) -> Changes:
    """Replace a folder by a link to a folder outside the store, with the objects of `there`."""
    mine = [key for key in world(name) if key.startswith(folder + "/")]

    def place(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()  # its objects have already been removed
        outside = path.parents[2].with_name("outside")
        shutil.rmtree(outside, ignore_errors=True)
        outside.mkdir()
        for key in mine:
            if key in there:
                (outside / key.removeprefix(folder + "/")).write_bytes(there[key])
        path.symlink_to(outside)

    return {**dict.fromkeys(mine), folder: place}


def _kind(key: str) -> str:
    return "".join("0" if c in "0123456789abcdef" else c for c in title(key))


def _optional(key: str) -> bool:
    """Return whether a run may lack the object; readers then ignore an odd entry in its place."""
    optional = (keys.policies(), keys.validations(), keys.attempts())
    if key.startswith(keys.validations()) and key.endswith("plan.json"):
        return False  # the validation's samples need their plan
    return key.startswith(optional) or key.endswith(("plan.json", "metrics.json"))


def _lost(name: str, key: str, what: str) -> bool:
    """Return whether the entry is a folder, so that the store merely lacks an optional object."""
    return "folder" in what and "link" not in what and may_be_absent(key, world(name))


def removed(path: Path) -> None:
    """Remove an entry of any type, if it exists."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        path.unlink()
