"""Functions that start a program as several ranks on this machine, like the trainer's launcher."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.exhaustive import sample_or_all
from tests.paths import ROOT

LIMIT_S = sample_or_all(600.0, 7200.0)
"""Default limit for a program. With all cases, one program runs for many minutes."""


def start_ranks(
    program: str | Path,
    ranks: int,
    *arguments: str | Path,
    node: Sequence[str] = ("--standalone",),
    guarded_by: int | None = None,
) -> subprocess.Popen[str]:
    """Start a program under torchrun, in its own process group.

    Args:
        program: The name of a module, or a file that ends in .py.
        ranks: The number of ranks on this node.
        arguments: The program's arguments.
        node: torchrun's node arguments.
        guarded_by: The reading end of a pipe. The program then runs under the launcher's guard
            until the other end is closed. If None, there is no guard.

    Returns:
        The torchrun process, with stdout and stderr in one pipe.
    """
    name = str(program)
    guard = [] if guarded_by is None else [sys.executable, "-m", "pipeline.launch.guard"]
    torchrun = [*guard, sys.executable, "-m", "torch.distributed.run", *node]
    what = [name] if name.endswith(".py") else ["-m", name]
    return subprocess.Popen(
        [*torchrun, "--nproc-per-node", str(ranks), *what, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=guarded_by,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_killed(program: str | Path, ranks: int, *arguments: str | Path, timeout_s: float) -> str:
    """Run a program in which one rank kills itself, and return its output.

    A killed rank can leave behind a process that it has forked to write a checkpoint, and this
    process keeps the pipe open. The ranks therefore run under the launcher's guard, which ends all
    of their processes.

    Args:
        program: The name of a module, or a file that ends in .py.
        ranks: The number of ranks.
        arguments: The program's arguments.
        timeout_s: The limit for the program, in seconds.
    """
    held, open_end = os.pipe()  # the guard ends when all copies of the other end are closed
    try:
        process = start_ranks(program, ranks, *arguments, guarded_by=held)
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        os.close(held)
        os.close(open_end)
    assert process.returncode != 0, output[-3000:]
    return output


def run_ranks(
    program: str | Path, ranks: int, *arguments: str | Path, timeout_s: float = LIMIT_S
) -> str:
    """Run a program to completion and return its output; a failing rank fails the test.

    Args:
        program: The name of a module, or a file that ends in .py.
        ranks: The number of ranks.
        arguments: The program's arguments.
        timeout_s: The limit for the program, in seconds.
    """
    return _finished([start_ranks(program, ranks, *arguments)], timeout_s)


def run_nodes(
    program: str | Path, ranks: int, *arguments: str | Path, timeout_s: float = LIMIT_S
) -> str:
    """Do the same as run_ranks, but on two nodes that connect over TCP, as training pods do.

    Both nodes are on this machine.

    Args:
        program: The name of a module, or a file that ends in .py.
        ranks: The number of ranks on both nodes together.
        arguments: The program's arguments.
        timeout_s: The limit for the program, in seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    return _finished(
        [
            start_ranks(program, ranks // 2, *arguments, node=(*place, "--node-rank", str(node)))
            for node in range(2)
        ],
        timeout_s,
    )


def _finished(processes: list[subprocess.Popen[str]], timeout_s: float) -> str:
    """Return the output of processes that must succeed; on an error or timeout, kill them all."""
    try:
        with ThreadPoolExecutor(len(processes)) as readers:
            outputs = list(readers.map(lambda p: p.communicate(timeout=timeout_s)[0], processes))
    except BaseException:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        raise
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, (
            f"{process.args} ended with {process.returncode}:\n{output[-12000:]}"
        )
    return "".join(outputs)
