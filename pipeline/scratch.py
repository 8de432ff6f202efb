"""Scratch folders under TMPDIR, which a later process removes when their owner was killed.

A folder's name identifies its owner:

    retrace-<purpose>-<host>-<boot>-<pid namespace>-<pid>-<start of the process>-<random>

The folder has this name from its creation on, so no other process ever sees an unmarked folder. The
start time distinguishes a process from a later one with the same number.
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

_MARK = re.compile(
    r"retrace-[a-z]+-(?P<host>[0-9a-f]{8})-(?P<boot>[0-9a-f]{8})-(?P<namespace>\d+)"
    r"-(?P<pid>\d+)-(?P<started>\d+)-\w+"
)
_DEAD = "ZX"
"""States of an ended process whose parent has not yet collected its exit code."""


@dataclass(frozen=True)
class Owner:
    """A unique identity of a process.

    Example: Owner('2f0c9a1b', '77e01d4c', 4026531836, 17, 93).
    """

    host: str
    boot: str
    """Identifies this start of the host."""
    namespace: int
    """PID namespace: containers on one host number their processes separately."""
    pid: int
    started: int
    """Clock ticks from the start of the host to that of the process."""

    def __str__(self) -> str:
        return f"{self.host}-{self.boot}-{self.namespace}-{self.pid}-{self.started}"


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Make a folder under TMPDIR for the duration of the block; its name contains `purpose` (a-z).

    First removes the scratch folders of killed processes, so that their disk space is free for this
    one.
    """
    remove_abandoned()
    prefix = f"retrace-{purpose}-{this_process()}-"
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


def remove_abandoned() -> None:
    """Remove the scratch folders under TMPDIR whose owner is gone.

    Considers only folders of this user whose owner ran on this host. Folders that cannot be judged
    stay: those without an owner in their name, or with one in another container. Several processes
    may do this at the same time.
    """
    for folder in sorted(Path(tempfile.gettempdir()).glob("retrace-*")):
        owner = _owner(folder)
        if owner is None or not _is_gone(owner):
            continue
        # A rename takes the folder over: one of several removers succeeds, and if it is killed, the
        # rest of the folder carries its name as owner.
        taken = folder.with_name(f"retrace-abandoned-{this_process()}-{folder.name[-8:]}")
        try:
            folder.rename(taken)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("scratch folder %s of a killed process stays: %s", folder, error)
            continue
        shutil.rmtree(taken, onerror=_not_removed)
        log.info("removed scratch folder %s of process %d, which was killed", folder, owner.pid)


def this_process() -> Owner:
    """This process as an owner."""
    host, boot, namespace = _place()
    return Owner(host, boot, namespace, os.getpid(), _state_and_start(os.getpid())[1])


@cache
def _place() -> tuple[str, str, int]:
    """Host, boot and PID namespace of this process."""
    names = [socket.gethostname()]
    with suppress(OSError):  # many containers have none
        names.append(Path("/etc/machine-id").read_text().strip())
    host = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return host, boot, os.stat("/proc/self/ns/pid").st_ino


def _owner(folder: Path) -> Owner | None:
    """The owner of a folder; None if its name has none, or it is another user's or no folder."""
    match = _MARK.fullmatch(folder.name)
    if match is None:
        return None
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return None
    numbers = (int(match[name]) for name in ("namespace", "pid", "started"))
    return Owner(match["host"], match["boot"], *numbers)


def _is_gone(owner: Owner) -> bool:
    """Whether a process is known to have ended."""
    host, boot, namespace = _place()
    if owner.host != host:
        return False
    if owner.boot != boot:
        return True  # this host has restarted since
    if owner.namespace != namespace:
        return False
    try:
        state, started = _state_and_start(owner.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in _DEAD or started != owner.started


def _state_and_start(pid: int) -> tuple[str, int]:
    """State and start time of a process, from /proc/PID/stat."""
    text = Path(f"/proc/{pid}/stat").read_text()
    # The second field is the program's name in parentheses; it may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _not_removed(function: object, path: str, error: object) -> None:
    log.warning("scratch of a killed process: %s stays: %s", path, error)
