"""`python -m operators.rollout.reward_process FD`: a process that runs a run's reward function.

The rollout worker holds the other end of the socket FD. Messages are JSON: first the code to load
({"source", "name", "memory_bytes"}), then a sample at a time. Each is answered by {"error": text}
or, for a sample, {"reward", "extras"}; an answer to the code has neither when it was loaded.

The function runs in this process's main thread, so it may use signals, and may end the process.
Nothing here imports an engine.
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

from pipeline.orphans import die_with_parent
from pipeline.rl import data_sources
from pipeline.rl.rewards import RewardError, RewardFunction, load_reward, score

_TIMERS = (
    (signal.ITIMER_REAL, signal.SIGALRM),
    (signal.ITIMER_VIRTUAL, signal.SIGVTALRM),
    (signal.ITIMER_PROF, signal.SIGPROF),
)


def main(descriptor: int) -> None:
    """Answer until the worker closes its end."""
    die_with_parent()
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    # Left by an exception when the worker has closed its end, perhaps while a sample was scored.
    with contextlib.suppress(EOFError, ConnectionError):
        code = json.loads(connection.recv_bytes())
        _limit_memory(code["memory_bytes"])
        try:
            function = _load(code["source"], code["name"])
        except RewardError as error:
            _send(connection, {"error": str(error)})
            return
        _send(connection, {})
        while True:
            sample = json.loads(connection.recv_bytes())
            _send(connection, _scored(function, sample))


def _load(source: str | None, name: str) -> RewardFunction:
    if source is None:
        return data_sources.compute_score
    return load_reward(source.encode("latin-1"), name)  # the bytes of the file


def _scored(function: RewardFunction, sample: dict[str, Any]) -> dict[str, Any]:
    try:
        found = score(function, **sample)
    except RewardError as error:
        return {"error": str(error)}
    finally:
        for timer, number in _TIMERS:  # an alarm that was left on would meet the next sample
            signal.setitimer(timer, 0)
            signal.signal(number, signal.SIG_DFL)
    return {"reward": found.reward, "extras": found.extras}


def _limit_memory(limit: int) -> None:
    """More raises MemoryError. If memory ends anyway, the kernel kills this process first."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text("1000")


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
