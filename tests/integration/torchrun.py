"""Start a program on several ranks of this machine, as the trainer's launcher does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT


def start_ranks(program: str | Path, ranks: int, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start `program` (a module's name or a file) under torchrun, in a process group of its own."""
    name = str(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
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
    process = start_ranks(program, ranks, *arguments)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    assert process.returncode == 0, f"{program} ended with {process.returncode}:\n{output[-12000:]}"
    return output
