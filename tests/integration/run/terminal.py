"""A program on a terminal of its own, or in a pipe: what it prints, and what it started."""

import fcntl
import os
import pty
import subprocess
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.patience import PATIENCE_S, eventually

_CTRL_C = b"\x03"


@dataclass
class Shown:
    """A program that runs, and what it has printed so far."""

    process: subprocess.Popen[bytes]
    _end: int
    _printed: bytearray = field(default_factory=bytearray)
    _reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press_ctrl_c(self) -> None:
        """The terminal sends SIGINT to the whole process group in its foreground."""
        os.write(self._end, _CTRL_C)

    def text(self) -> str:
        """What it has printed."""
        return self._printed.decode(errors="replace")

    def descendants(self) -> list[psutil.Process]:
        """Every process below it."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ended(self) -> int:
        """Its exit code, once it has ended and nobody holds its output open."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert not self._reader.is_alive(), "somebody holds its output open"
        return code

    def _read(self) -> None:
        while True:
            try:
                read = os.read(self._end, 65536)
            except OSError:  # a terminal that nobody holds open any more
                return
            if not read:
                return
            self._printed += read


@contextmanager
def on_a_terminal(command: Sequence[str], folder: Path) -> Iterator[Shown]:
    """The program leads the session and the foreground group of a terminal, as a shell's job."""
    ours, its = pty.openpty()
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=its,
            stdout=its,
            stderr=its,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
    finally:
        os.close(its)
    try:
        yield Shown(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@contextmanager
def in_a_pipe(command: Sequence[str], folder: Path) -> Iterator[Shown]:
    """The program writes to a pipe, as in `command | cat`."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    try:
        yield Shown(process, process.stdout.fileno())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def all_end(processes: Sequence[psutil.Process]) -> None:
    """Wait until none of these is there."""

    def alive() -> list[str]:
        return [" ".join(p.cmdline()) for p in processes if is_alive(p)]

    eventually(lambda: not alive(), alive)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that ended and was not reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
