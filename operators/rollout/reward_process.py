"""`python -m operators.rollout.reward_process FD`: compute rewards with a run's reward function.

The rollout worker holds the other end of the socket FD. All messages are JSON. The worker first
sends the code ({"source", "name", "memory_bytes"}), then one sample at a time. The answer to the
code is empty, and the answer to a sample is {"reward", "extras"}. After an error, the answer is
{"error": text}.

The function runs in this process's main thread, so it may use signals and may end the process. This
module does not import the engine.
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
    """Answer the worker's messages until the worker closes the socket."""
    die_with_parent()
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    # The loop ends with one of these exceptions when the worker closes the socket, perhaps while a
    # sample is being scored.
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
        for timer, number in _TIMERS:  # an alarm that is still set would interrupt the next sample
            signal.setitimer(timer, 0)
            signal.signal(number, signal.SIG_DFL)
    return {"reward": found.reward, "extras": found.extras}


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
