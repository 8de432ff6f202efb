"""Computes rewards in separate processes that cannot reach the engine or the credentials.

    engine's thread    finished response ──► submit ─┐
    N threads          decode ─► one process each, a sample at a time, at most reward.timeout_s
    writer's thread    waits for the sample's future, in the order of the responses

If a process hangs, crashes or is killed, only its current sample fails, and the next sample gets a
new process. Messages are JSON, never pickles, so that reading them cannot run users' code here.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import LifoQueue
from types import TracebackType
from typing import Any, Self

from operators.rollout.prompts import Wanted
from pipeline.config.reward import Reward
from pipeline.hardware import memory_size
from pipeline.rl.data_sources import find_scorer
from pipeline.rl.rewards import MEND, RewardError, at_sample, overlong_penalty
from pipeline.traces import TraceError
from pipeline.traces.format.domain import json_text

_PASSED = {
    "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "HF_HOME", "HOME", "LANG", "LANGUAGE",
    "LD_LIBRARY_PATH", "LOGNAME", "NVIDIA_VISIBLE_DEVICES", "PATH", "SSL_CERT_DIR", "SSL_CERT_FILE",
    "TMPDIR", "TOKENIZERS_PARALLELISM", "TZ", "USER", "VIRTUAL_ENV",
}  # fmt: skip
_PASSED_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_", "PYTHON", "REWARD_")
"""Reward processes inherit the variables in _PASSED and those with these prefixes. All others, such
as the credentials of the store and of Prefect, are withheld. For their own variables, users choose
names with the prefix REWARD_."""


ERROR_BYTES = 16 << 10
"""The maximum length of the error text in a masked sample, in bytes of UTF-8."""
_UNWRITABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class RewardCode:
    """The code that scores a run's samples. Example: RewardCode(b'def compute_score...', ...)."""

    source: bytes | None
    """The content of the reward file. None selects a built-in scorer for each data_source."""
    name: str = "compute_score"
    """The name of the function in the file."""


@dataclass(frozen=True)
class Scored:
    """A sample's reward, or the error if there is no reward."""

    reward: float | None
    error: str | None
    extras: dict[str, Any]


class _EndedError(Exception):
    """A process exited or was killed before it answered; the text describes how it ended."""


class Scorer:
    """Runs the reward function in up to `settings.num_workers` processes.

    The constructor starts the first process; each other process is started on its first use.
    Leaving the `with` block ends the processes and cancels waiting samples.

    Args:
        code: The code to run.
        settings: The reward settings.
        start_timeout_s: Seconds that a process may take to load the code.
        max_length: The maximum length of a response in tokens, for the penalty on long responses.

    Raises:
        RewardError: The code cannot be loaded, or loading it takes too long.
    """

    def __init__(
        self, code: RewardCode, settings: Reward, start_timeout_s: float, max_length: int
    ) -> None:
        self._code = code
        self._settings = settings
        self._max_length = max_length
        self._processes = [
            _RewardProcess(code, start_timeout_s) for _ in range(settings.num_workers)
        ]
        try:
            self._processes[0].start()
        except _EndedError as error:
            raise RewardError(f"reward file: loading it failed: {error}; fix the file") from error
        # Last in, first out, so that no more processes are started than are needed simultaneously.
        self._idle: LifoQueue[_RewardProcess] = LifoQueue()
        for process in reversed(self._processes):
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(settings.num_workers, thread_name_prefix="reward")

    def submit(self, wanted: Wanted, text: Callable[[], str], length: int) -> Future[Scored]:
        """Submit a response for scoring.

        Args:
            wanted: The planned sample.
            text: Decodes the response; it is called in a scoring thread.
            length: The length of the response in tokens.

        Returns:
            A future. If scoring fails and errors are not masked, the future raises a RewardError
            that names the sample.
        """
        return self._threads.submit(self._scored, wanted, text, length)

    def close(self) -> None:
        """End all processes, including those that hang."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.stop()
        self._threads.shutdown(wait=True)
        for process in self._processes:
            process.end()

    def _scored(self, wanted: Wanted, text: Callable[[], str], length: int) -> Scored:
        prompt = wanted.prompt
        sample = {
            "sample_id": wanted.id,
            "data_source": prompt.data_source,
            "solution_str": text(),
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
        }
        process = self._idle.get()
        try:
            answer = process.ask(sample, self._settings.timeout_s)
        except _EndedError as end:
            answer = self._without_answer(wanted, str(end))
        finally:
            self._idle.put(process)
        error = answer.get("error") or _unwritable(wanted, answer["extras"])
        if error is None:
            return self._with_penalty(Scored(answer["reward"], None, answer["extras"]), length)
        if self._settings.on_error == "fail":
            raise RewardError(error)
        return Scored(None, _writable(error), {})

    def _with_penalty(self, scored: Scored, length: int) -> Scored:
        overlong = self._settings.reward_kwargs.overlong_buffer_cfg
        if not overlong.enable or scored.reward is None:
            return scored
        penalty = overlong_penalty(length, self._max_length, overlong.len, overlong.penalty_factor)
        extras = {**scored.extras, "overlong_reward": penalty}
        return Scored(scored.reward + penalty, None, extras)

    def _without_answer(self, wanted: Wanted, how: str) -> dict[str, Any]:
        source = wanted.prompt.data_source
        if self._code.source is None and (scorer := find_scorer(source)) is not None:
            # As in verl, an answer that cannot be compared counts as wrong.
            return {"reward": scorer.wrong_reward, "extras": {"acc": False}}
        return {
            "error": f"{at_sample(wanted.id, source)}: the reward function failed: {how}; " + MEND
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass
class _RewardProcess:
    """A process that scores one sample at a time.

    Only one thread at a time may call its methods, except for `stop`.
    """

    code: RewardCode
    start_timeout_s: float
    _process: subprocess.Popen[bytes] | None = None
    _connection: Connection | None = None
    _stopped: bool = False

    def start(self) -> None:
        """Start the process and load the code.

        Raises RewardError if the code cannot be used, and _EndedError if the code ends the process.
        """
        self._connection, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "operators.rollout.reward_process", str(descriptor)],
                stdin=subprocess.DEVNULL,
                env=reward_environment(),
                pass_fds=(descriptor,),
                start_new_session=True,  # so that the function's child processes end with it
            )
        if self._stopped:  # another thread called `stop`, perhaps before the process existed
            self._kill()
        source = self.code.source
        message = {
            "source": None if source is None else source.decode("latin-1"),  # keeps all bytes
            "name": self.code.name,
            "memory_bytes": memory_size() // 2,  # the other half is for the engine
        }
        error = self._exchange(message, self.start_timeout_s, "launch.start_timeout_s").get("error")
        if error is not None:
            self.end()
            raise RewardError(error)

    def ask(self, sample: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        """Return the answer to a sample. Raises _EndedError if the process ended without one."""
        if self._connection is None:
            try:
                self.start()
            except RewardError as error:  # although the first process could load it
                raise _EndedError(f"its process ended, and a new one failed: {error}") from error
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
        self, message: dict[str, Any], limit_s: float | None, limit: str
    ) -> dict[str, Any]:
        assert self._connection is not None
        try:
            self._connection.send_bytes(json.dumps(message).encode())
            if not self._connection.poll(limit_s):
                self.end()
                raise _EndedError(
                    f"it did not return within {limit}={limit_s:g} s, so its process was ended"
                )
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise _EndedError(_how_it_ended(self.end())) from error
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
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED or name.startswith(_PASSED_PREFIXES)
    }
    path = os.pathsep.join(folder for folder in sys.path if folder)
    return {"PYTHONHASHSEED": "0", **passed, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _writable(error: str) -> str:
    """Return an error's text in a form that a trace can store and a terminal can show.

    U+FFFD replaces unpaired surrogates, and control characters other than line feeds and tabs. A
    text longer than ERROR_BYTES in UTF-8 is truncated and ends with "...".
    """
    text = _UNWRITABLE.sub("\ufffd", error)
    if len(content := text.encode()) <= ERROR_BYTES:
        return text
    return content[: ERROR_BYTES - 3].decode(errors="ignore") + "..."


def _unwritable(wanted: Wanted, extras: dict[str, Any]) -> str | None:
    """Return why a trace cannot store the extras of a sample, or None if it can."""
    where = at_sample(wanted.id, wanted.prompt.data_source)
    try:
        # Includes the longest text that the penalty on long responses can add.
        json_text({"overlong_reward": -1.7976931348623157e308, **extras}, f"{where}: extras")
    except TraceError as error:
        return f"{error}; {MEND}"
    return None


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed (SIGKILL, perhaps by the kernel because memory ran out)"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
