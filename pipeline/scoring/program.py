"""`python -m pipeline.scoring.program FD`: compute rewards with a run's reward function.

The rollout worker, or the flow that checks or tries the function, holds the other end of the socket
FD. All messages are JSON. The other end first names the code ({"path", "name", "kwargs", "setting",
"memory_bytes"}), then sends one sample at a time. The answer to the code is empty, and the answer
to a sample is {"reward", "extras", "left_out"}. After an error, the answer is {"error": text}; for
code, it also contains "absent" (see `is_absent_here`). With "setting", the code is an estimator or
a loss, which is only loaded.

The function runs in this process's main thread, so it may use signals and may end the process. The
modules next to the reward file can be imported.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline.errors import LastingError
from pipeline.orphans import die_with_parent
from pipeline.rl import data_sources
from pipeline.rl.custom import CUSTOM, is_absent_here, load_custom
from pipeline.rl.rewards import (
    RewardError,
    RewardFunction,
    environment_hint,
    is_passed,
    load_reward,
    score,
)
from pipeline.scoring.source import uses_of

_TIMERS = (
    (signal.ITIMER_REAL, signal.SIGALRM),
    (signal.ITIMER_VIRTUAL, signal.SIGVTALRM),
    (signal.ITIMER_PROF, signal.SIGPROF),
)


def main(descriptor: int) -> None:
    """Answer the worker's messages until the worker closes the socket."""
    die_with_parent()
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    # The loop ends with one of these exceptions when the worker closes the socket, perhaps while a
    # sample is being scored.
    with contextlib.suppress(EOFError, ConnectionError):
        code = json.loads(connection.recv_bytes())
        _limit_memory(code["memory_bytes"])
        path, setting = code["path"], code["setting"]
        try:
            if setting is not None:
                load_custom(Path(path).read_bytes(), code["name"], CUSTOM[setting])
                _send(connection, {})
                return
            function = _load(path, code["name"], code["kwargs"])
        except LastingError as error:
            _send(connection, _unloaded(error, path))
            return
        _send(connection, {})
        while True:
            sample = json.loads(connection.recv_bytes())
            _send(connection, _scored(function, sample, path))


def _load(path: str | None, name: str, kwargs: dict[str, Any]) -> RewardFunction:
    if path is None:
        return data_sources.compute_score
    sys.path.insert(0, os.path.dirname(path))
    return load_reward(Path(path).read_bytes(), name, kwargs, Path(path))


def _unloaded(error: LastingError, path: str | None) -> dict[str, Any]:
    """Return the answer for code that cannot be loaded."""
    if isinstance(error, RewardError):
        available = {name for name in _required(path) if is_passed(name)}
        return {"error": _hinted(error, path), "absent": is_absent_here(error, available)}
    return {"error": str(error), "absent": is_absent_here(error, _required(path))}


def _hinted(error: RewardError, path: str | None) -> str:
    """Return an error's text, with a hint at environment variables that may have caused it."""
    return f"{error}{environment_hint(error, _required(path))}" if path else str(error)


def _required(path: str | None) -> set[str]:
    """Return the environment variables that the code reads without a default."""
    files = Path(path).parent.rglob("*.py") if path else ()
    return {name for file in files for name in uses_of(file.read_bytes()).required}


def _scored(function: RewardFunction, sample: dict[str, Any], path: str | None) -> dict[str, Any]:
    try:
        found = score(function, **sample)
    except RewardError as error:
        return {"error": _hinted(error, path)}
    finally:
        for timer, number in _TIMERS:  # an alarm that is still set would interrupt the next sample
            signal.setitimer(timer, 0)
            signal.signal(number, signal.SIG_DFL)
    return {"reward": found.reward, "extras": found.extras, "left_out": found.left_out}


def _limit_memory(limit: int) -> None:
    """Limit the memory of this process to `limit` bytes; beyond that, Python raises MemoryError.

    If the machine's memory runs out anyway, the kernel kills this process first.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text("1000")


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
