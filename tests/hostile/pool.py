"""Child processes that try cases, with limits on time and memory. A hanging child is killed."""

import gc
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import sha256
from multiprocessing.connection import Connection, wait
from pathlib import Path

from pipeline.orphans import die_with_parent
from tests.hostile.case import Case

MEMORY_MB = 768
"""The additional address space that a child may use for one case.

The limit detects readers that trust a claimed length. It is enough for two copies of the largest
content of a row group (256 MB and more), and for the allocator's overhead.
"""
LIMIT_S = 60.0
"""CPU seconds per case; a case usually takes a tenth of a second."""
_WAITED = 10
"""The limit on elapsed time, as a multiple of the limit on CPU time.

The multiple is high because the machine may be busy.
"""


def tried(
    numbers: Sequence[int], whole: bool, processes: int = 2, limit_s: float = LIMIT_S
) -> Iterator[tuple[int, object]]:
    """Try cases in child processes, and yield their numbers and verdicts in order of completion.

    Args:
        numbers: Numbers of cases in `all_cases`.
        whole: Whether to try each case with every slow reader and command, not only with one.
        processes: The number of child processes.
        limit_s: The limit on CPU time per case, in seconds.
    """
    from tests.hostile.campaign import all_cases
    from tests.hostile.judge import Verdict

    cases = all_cases()
    # Shuffle the cases within each world. Children take cases from both ends of the list, so that
    # each child builds few worlds.
    mixed = {n: (cases[n].world, sha256(cases[n].name.encode()).digest()) for n in numbers}
    waiting = deque(sorted(numbers, key=mixed.__getitem__))
    children: dict[Connection, _Child] = {}

    def next_of(child: _Child) -> int:
        return waiting.popleft() if child.in_front else waiting.pop()

    def start() -> None:
        if waiting:
            child = _Child(whole, in_front=not any(c.in_front for c in children.values()))
            children[child.pipe] = child
            child.give(next_of(child))

    try:
        for _ in range(processes):
            start()
        while children:
            ready = wait(list(children), timeout=1.0)
            for pipe in ready:
                child = children[pipe]  # type: ignore[index]
                number = child.number
                try:
                    verdict = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    verdict = Verdict(tracebacks=[f"the process died: {child.ended()}"])
                    del children[child.pipe]
                    start()
                else:
                    if waiting:
                        child.give(next_of(child))
                    else:
                        child.end()
                        del children[child.pipe]
                yield number, verdict
            for child in [c for c in children.values() if c.late(limit_s)]:
                child.kill()
                del children[child.pipe]
                yield child.number, Verdict(hung=True, wall_s=limit_s)
                start()
    finally:
        for child in children.values():
            child.kill()


class _Child:
    """A child process and its current case. The child ends with this process."""

    def __init__(self, whole: bool, in_front: bool) -> None:
        self.in_front = in_front
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, whole), daemon=True)
        self._process.start()
        theirs.close()
        self.number, self._given = -1, 0.0
        self._cpu_s = 0.0

    def give(self, number: int) -> None:
        """Send the child a case and start its clocks. The first case also builds its world."""
        self.number, self._given, self._cpu_s = number, time.monotonic(), self._used_s()
        self.pipe.send(number)

    def late(self, limit_s: float) -> bool:
        waited_s = time.monotonic() - self._given
        return self._used_s() - self._cpu_s > limit_s or waited_s > _WAITED * limit_s

    def _used_s(self) -> float:
        """Return the child's CPU seconds so far; infinity after it has ended."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return math.inf
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ended(self) -> str:
        self._process.join(10)
        return f"exit code {self._process.exitcode}"

    def end(self) -> None:
        self.pipe.send(None)
        self._process.join(10)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)


def _work(pipe: Connection, whole: bool) -> None:
    """Try the cases whose numbers arrive in the pipe, until None arrives."""
    die_with_parent()
    from tests.hostile.campaign import all_cases
    from tests.hostile.judge import Placed

    cases = all_cases()
    # Exclude permanent objects from garbage collection before each case.
    gc.collect()
    gc.freeze()
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=shm if shm.is_dir() else None) as root:
        worlds: dict[str, Placed] = {}
        while (number := pipe.recv()) is not None:
            case = cases[number]
            if case.world not in worlds:
                worlds[case.world] = Placed(case.world, Path(root))
            pipe.send(_tried(case, worlds[case.world], None if whole else number))


def _tried(case: Case, placed: object, turn: int | None) -> object:
    from tests.hostile.judge import Verdict, judge, truth

    for step in (0, 1):
        truth(case.world, step)
    began = time.process_time()
    changes = case.make()
    if changes is None:
        return Verdict(impossible=True)
    gc.collect()
    started, before = time.monotonic(), _reset_peak_mb()
    with _bounded():
        try:
            verdict = judge(case, placed, changes, turn)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - the verdict also reports errors of the campaign itself
            verdict = Verdict(tracebacks=[f"campaign: {traceback.format_exc()[-600:]}"])
    verdict.wall_s, verdict.cpu_s = time.monotonic() - started, time.process_time() - began
    verdict.memory_mb = max(0.0, _status_mb("VmHWM") - before)
    return verdict


class _bounded:  # noqa: N801
    """A context that limits the address space to the current use plus MEMORY_MB."""

    def __enter__(self) -> None:
        self._old = resource.getrlimit(resource.RLIMIT_AS)
        size = int(_status_mb("VmSize") + MEMORY_MB) << 20
        resource.setrlimit(resource.RLIMIT_AS, (size, self._old[1]))

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._old)


def _status_mb(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _reset_peak_mb() -> float:
    """Reset the process's peak memory, and return its current memory in MiB."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        sys.stderr.write("the peak memory cannot be reset on this machine\n")
    return _status_mb("VmRSS")
