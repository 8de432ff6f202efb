"""One process that loads and runs users' code, and the environment that it gets.

Messages are JSON, never pickles, so that reading them cannot run users' code here.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline.hardware import memory_size
from pipeline.rl.custom import CUSTOM
from pipeline.rl.rewards import REWARD, RewardError, is_passed
from pipeline.scoring.code import RewardCode


class AbsentError(RewardError):
    """The code cannot be loaded here, but the workers may have what is missing."""


class EndedError(Exception):
    """A process exited or was killed before it answered; the text describes how it ended."""


@dataclass
class RewardProcess:
    """A process that scores one sample at a time, or only loads an estimator or a loss.

    Only one thread at a time may call its methods, except for `stop`.
    """

    code: RewardCode
    path: Path | None
    """The reward file in the folder with the unpacked code; None for the built-in scorers."""
    start_timeout_s: float
    """Seconds that the process may take to load the code."""
    start_limit: str = "launch.start_timeout_s"
    """The name of this limit, for messages."""
    setting: str | None = None
    """The setting that names an estimator or a loss (see pipeline.rl.custom.CUSTOM)."""
    _process: subprocess.Popen[bytes] | None = None
    _connection: Connection | None = None
    _stopped: bool = False

    def start(self) -> None:
        """Start the process and load the code.

        Raises RewardError if the code cannot be used or ends the process; AbsentError if it lacks
        something that the workers may have.
        """
        self._connection, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.scoring.program", str(descriptor)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what users' code prints must not mix with our output
                env=reward_environment(),
                pass_fds=(descriptor,),
                start_new_session=True,  # so that the function's child processes end with it
            )
        if self._stopped:  # another thread called `stop`, perhaps before the process existed
            self._kill()
        message = {
            "path": None if self.path is None else str(self.path),
            "name": self.code.name,
            "kwargs": self.code.kwargs,
            "setting": self.setting,
            "memory_bytes": memory_size() // 2,  # the other half is for the engine
        }
        try:
            answer = self._exchange(message, self.start_timeout_s, self.start_limit)
        except EndedError as error:
            file = CUSTOM[self.setting].file if self.setting else REWARD.file
            raise RewardError(f"{file}: loading it failed: {error}; fix the file") from error
        if "error" in answer:
            self.end()
            raise (AbsentError if answer["absent"] else RewardError)(answer["error"])

    def ask(self, sample: Mapping[str, Any], timeout_s: float | None) -> dict[str, Any]:
        """Return the answer to a sample. Raises EndedError if the process ended without one."""
        if self._connection is None:
            try:
                self.start()
            except RewardError as error:  # although the first process could load it
                raise EndedError(f"its process ended, and a new one failed: {error}") from error
        return self._exchange(sample, timeout_s, "reward.timeout_s")

    def stop(self) -> None:
        """End the process permanently; another thread may be waiting for it."""
        self._stopped = True
        self._kill()

    def end(self) -> int:
        """Kill and reap the process, and return its exit code; 0 if no process was started."""
        self._kill()
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        return 0 if process is None else process.wait()

    def _exchange(
        self, message: Mapping[str, Any], limit_s: float | None, limit: str
    ) -> dict[str, Any]:
        assert self._connection is not None
        try:
            self._connection.send_bytes(json.dumps(message).encode())
            if not self._connection.poll(limit_s):
                self.end()
                raise EndedError(
                    f"it did not return within {limit_s:g} s ({limit}), so its process was ended"
                )
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise EndedError(_how_it_ended(self.end())) from error
        return answer

    def _kill(self) -> None:
        """Kill the process and its children. A process that has ended keeps its exit code."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def reward_environment() -> dict[str, str]:
    """Return the environment for the processes that run users' code, without credentials.

    These processes can import the same modules as this process. Python's hashes are the same in
    every process, so a function that iterates over a set sees the same order after a restart.
    """
    passed = {name: value for name, value in os.environ.items() if is_passed(name)}
    path = os.pathsep.join(folder for folder in sys.path if folder)
    return {"PYTHONHASHSEED": "0", **passed, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed (SIGKILL, perhaps by the kernel because memory ran out)"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
