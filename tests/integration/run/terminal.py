"""Functions that run a program on its own terminal or in a pipe, and observe it."""

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
    """A running program with its output so far."""

    process: subprocess.Popen[bytes]
    _end: int
    _printed: bytearray = field(default_factory=bytearray)
    _reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press_ctrl_c(self) -> None:
        """Make the terminal send SIGINT to all processes of its foreground group."""
        os.write(self._end, _CTRL_C)

    def text(self) -> str:
        """Return the program's output so far."""
        return self._printed.decode(errors="replace")

    def descendants(self) -> list[psutil.Process]:
        """Return all processes that the program has started, directly or indirectly."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ended(self) -> int:
        """Wait until the program has ended and its output is closed; return the exit code."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert not self._reader.is_alive(), "another process keeps the output open"
        return code

    def _read(self) -> None:
        while True:
            try:
                read = os.read(self._end, 65536)
            except OSError:  # no process keeps the terminal open any more
                return
            if not read:
                return
            self._printed += read


@contextmanager
def on_a_terminal(command: Sequence[str], folder: Path) -> Iterator[Shown]:
    """Run the program as the leader of a terminal's session and foreground group."""
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
    """Run the program with its output in a pipe, as in `command | cat`."""
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
    """Wait until all of these processes have ended."""

    def alive() -> list[str]:
        return [" ".join(p.cmdline()) for p in processes if is_alive(p)]

    eventually(lambda: not alive(), alive)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process is running; a zombie counts as ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
