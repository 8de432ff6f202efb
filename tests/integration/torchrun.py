"""Start a program on several ranks of this machine, as the trainer's launcher does."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.paths import ROOT


def start_ranks(
    program: str | Path, ranks: int, *arguments: str | Path, node: Sequence[str] = ("--standalone",)
) -> subprocess.Popen[str]:
    """Start `program` (a module's name or a file) under torchrun, in a process group of its own.

    `node` are torchrun's arguments about nodes; `ranks` are those of this one.
    """
    name = str(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *node]
    what = [name] if name.endswith(".py") else ["-m", name]
    return subprocess.Popen(
        [*torchrun, "--nproc-per-node", str(ranks), *what, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_ranks(
    program: str | Path, ranks: int, *arguments: str | Path, timeout_s: float = 600
) -> str:
    """Run `program` to its end and return what it printed; a failing rank fails the test."""
    return _finished([start_ranks(program, ranks, *arguments)], timeout_s)


def run_nodes(
    program: str | Path, ranks: int, *arguments: str | Path, timeout_s: float = 600
) -> str:
    """Like run_ranks, on two nodes of this machine that find each other over TCP, as the pods of a
    training Job do."""
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
    """What they printed. A node that fails ends the others: their ranks wait for it."""
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
