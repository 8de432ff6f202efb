"""Scratch folders under TMPDIR, which a later process removes if their owner was killed.

A folder's name identifies its owner:

    retrace-<purpose>-<host>-<boot>-<pid namespace>-<pid>-<start of the process>-<random>

The folder is created with this name, so no other process ever sees an unmarked folder. The start
time distinguishes a process from a later one with the same PID.
"""

import hashlib
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_MARK = re.compile(r"retrace-[a-z]+-([0-9a-f]{8}-[0-9a-f]{8}-\d+-\d+-\d+)-\w+")
"""A scratch folder's name; the group is its owner's identity."""
_DEAD = "ZX"
"""The states of an ended process whose parent has not yet collected its exit code."""


@dataclass(frozen=True)
class Identity:
    """The unique identity of a process.

    Example: Identity('2f0c9a1b', '77e01d4c', 4026531836, 17, 93).
    """

    host: str
    boot: str
    """Identifies the boot of the host during which the process ran."""
    namespace: int
    """The PID namespace: containers on one host number their processes separately."""
    pid: int
    started: int
    """Clock ticks from the start of the host to the start of the process."""

    def __str__(self) -> str:
        return f"{self.host}-{self.boot}-{self.namespace}-{self.pid}-{self.started}"


@contextmanager
def scratch_folder(purpose: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a folder under TMPDIR, and remove it at the end of the block.

    The folder's name contains `purpose` (a-z). If `parent` is given, the folder is created in
    `parent`. Use this option for files that are later moved into `parent`. Scratch folders that
    killed processes left in the same place are removed first, to free their disk space.
    """
    remove_abandoned(parent)
    prefix = f"retrace-{purpose}-{this_process()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        yield Path(folder)


def remove_abandoned(parent: Path | None = None) -> None:
    """Remove the scratch folders under TMPDIR, or in `parent`, whose owner has ended.

    Only folders that belong to this user, and whose owning process ran on this host, are
    considered. A folder stays if its name identifies no owner, or if its owner is in a different
    container. Several processes may call this function at the same time.
    """
    for folder in sorted(Path(parent or tempfile.gettempdir()).glob("retrace-*")):
        match = _MARK.fullmatch(folder.name)
        if match is None or not _is_gone(owner := parse_identity(match[1])):
            continue
        # The rename makes this process the owner. Only one of several removers succeeds. If that
        # remover is killed, the name of the remaining folder identifies the remover as the owner.
        taken = folder.with_name(f"retrace-abandoned-{this_process()}-{folder.name[-8:]}")
        try:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            folder.rename(taken)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("cannot remove scratch folder %s of a killed process: %s", folder, error)
            continue
        shutil.rmtree(taken, onerror=_not_removed)
        log.info("removed scratch folder %s of process %d, which was killed", folder, owner.pid)


def this_process() -> Identity:
    """Return the identity of this process."""
    host, boot, namespace = _place()
    return Identity(host, boot, namespace, os.getpid(), _state_and_start(os.getpid())[1])


@cache
def _place() -> tuple[str, str, int]:
    """Return the host, boot and PID namespace of this process."""
    names = [socket.gethostname()]
    with suppress(OSError):  # many containers lack this file
        names.append(Path("/etc/machine-id").read_text().strip())
    host = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return host, boot, os.stat("/proc/self/ns/pid").st_ino


def parse_identity(text: str) -> Identity:
    """Return the identity that `str` shows as `text`. Raises ValueError for any other text."""
    host, boot, *numbers = text.split("-")
    return Identity(host, boot, *map(int, numbers))


def is_running(process: Identity) -> bool | None:
    """Return whether a process still runs; None if it ran elsewhere or before a restart."""
    if (process.host, process.boot, process.namespace) != _place():
        return None
    try:
        state, started = _state_and_start(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in _DEAD and started == process.started


def _is_gone(owner: Identity) -> bool:
    """Return whether a process is known to have ended."""
    host, boot, _ = _place()
    if owner.host == host and owner.boot != boot:
        return True  # this host has restarted since the process began
    return is_running(owner) is False


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return the state and start time of a process, from /proc/PID/stat."""
    text = Path(f"/proc/{pid}/stat").read_text()
    # The second field is the program's name in parentheses. The name may itself contain spaces and
    # parentheses.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _not_removed(function: object, path: str, error: object) -> None:
    log.warning("cannot remove %s in the scratch folder of a killed process: %s", path, error)
