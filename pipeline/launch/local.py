"""Workers as local processes, each under a guard that dies with the launcher."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipeline import progress
from pipeline.device import too_few_gpus
from pipeline.exits import CONFIGURATION_ERROR
from pipeline.hardware import core_count
from pipeline.launch.base import (
    LaunchError,
    Stage,
    StageFailedError,
    StageLastingError,
    repeats_of,
)
from pipeline.launch.commands import rollout_command, training_command
from pipeline.launch.guard import start_guarded
from pipeline.launch.tail import rank_exit_codes, why_ended

_START_MARK = "=== start of worker"
_KILLED = 128 + signal.SIGKILL
"""The guard's exit code for a command that was killed."""


@dataclass
class _Worker:
    stage: Stage
    index: int
    log: Path
    process: subprocess.Popen[bytes]
    ended: bool = False


@dataclass
class LocalWorkers:
    """The processes of all stages; safe to check from several threads."""

    folder: Path
    """Log files: <stage>-<index>.log, appended to by each restart."""
    show: Callable[[str], None]
    """Shows a line: a worker was restarted."""
    progress_folder: Path | None = None
    """Where each worker says what it does, in <stage>-<index>.json; None: nobody wants to know."""
    _workers: list[_Worker] = field(default_factory=list)
    _restarts: dict[str, int] = field(default_factory=dict)
    _failure: StageFailedError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, stage: Stage) -> None:
        """Start every worker of a stage."""
        self._restarts[stage.name] = 0
        for index in range(len(stage.commands)):
            log = self.folder / f"{stage.name}-{index}.log"
            self._workers.append(_Worker(stage, index, log, self._spawn(stage, index, log)))

    def check(self) -> bool:
        """Restart workers that ended with an error; StageFailedError when too many did, or when one
        met what a restart would meet again.

        Always False: this machine has no queue.
        """
        with self._lock:
            if self._failure is not None:  # every thread that waits gets it
                raise self._failure
            for worker in self._workers:
                code = worker.process.poll()
                if code is None or worker.ended:
                    continue
                if code == 0:
                    worker.ended = True
                    continue
                stage = worker.stage
                log = _last_start(worker.log)
                codes = {code, *rank_exit_codes(log)}
                how = _how_it_ended(code, codes)
                lasting = CONFIGURATION_ERROR in codes
                if lasting or self._restarts[stage.name] >= stage.max_restarts:
                    when = (
                        "and was not restarted, as it would meet the same error again"
                        if lasting
                        else f"after {self._restarts[stage.name]} restarts (launch.max_restarts)"
                    )
                    kind = StageLastingError if lasting else StageFailedError
                    self._failure = kind(
                        f"{stage.name} worker {worker.index} ended with {how} {when}. "
                        f"From {worker.log}:\n{why_ended([log])}"
                    )
                    raise self._failure
                self._restarts[stage.name] += 1
                self.show(
                    f"{stage.name} worker {worker.index} ended with {how}: restart "
                    f"{self._restarts[stage.name]} of {stage.max_restarts}, see {worker.log}"
                )
                if (again := stage.repeats()) is not None:
                    self.show(again)
                worker.process = self._spawn(stage, worker.index, worker.log)
        return False

    def stop(self, grace_s: float) -> None:
        """Give the workers time to end by themselves, then kill what is left.

        From now on `check` fails, so that no thread waits for workers that are gone.
        """
        with self._lock:
            self._failure = self._failure or StageFailedError("the workers were stopped")
        deadline = time.monotonic() + grace_s
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            if worker.process.stdin is not None:
                worker.process.stdin.close()  # the guard kills its command when the pipe closes
        for worker in self._workers:
            worker.process.wait()

    def detach(self) -> bool:
        """Local workers die with the process that started them."""
        return False

    def _spawn(self, stage: Stage, index: int, log: Path) -> subprocess.Popen[bytes]:
        environment = stage.environment
        if stage.devices:
            environment = {**environment, "CUDA_VISIBLE_DEVICES": stage.devices[index]}
        if self.progress_folder is not None:
            says = progress.environment(self.progress_folder / f"{stage.name}-{index}.json")
            environment = {**environment, **says}
        return _spawn(stage.commands[index], environment, f"{stage.name} {index}", log)


@contextlib.contextmanager
def local_workers(
    folder: Path,
    stages: Sequence[Stage],
    show: Callable[[str], None],
    progress_folder: Path | None = None,
) -> Iterator[LocalWorkers]:
    """Start stages as local processes; nothing of them is left after the block."""
    folder.mkdir(parents=True, exist_ok=True)
    workers = LocalWorkers(folder, show, progress_folder)
    try:
        for stage in stages:
            workers.start(stage)
        yield workers
    finally:
        workers.stop(grace_s=0.0)


def rollout_stage(
    run_uri: str,
    attempt: int,
    workers: int,
    max_restarts: int,
    threads: int,
    devices: tuple[str, ...],
) -> Stage:
    """The rollout workers of an attempt; `devices` has a text for each, or is empty."""
    commands = tuple(
        rollout_command(sys.executable, run_uri, str(index), attempt) for index in range(workers)
    )
    return Stage("rollout", commands, max_restarts, _environment(threads), devices=devices)


def training_stage(
    run_uri: str,
    attempt: int,
    ranks: int,
    max_restarts: int,
    threads: int,
    devices: tuple[str, ...],
) -> Stage:
    """The training ranks of an attempt: one torchrun on this machine."""
    command = training_command(sys.executable, ["--standalone"], ranks, run_uri, attempt)
    again = partial(repeats_of, run_uri)
    return Stage("training", (command,), max_restarts, _environment(threads), again, devices)


def devices_of(
    pool: Sequence[str], ranks: int, workers: int, tensor_parallel: int
) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of the training gang, then of each rollout worker; () without GPUs.

    Each GPU has one owner; the only one of a machine has several.
    Example: devices_of(("0", "1", "2", "3"), 2, 1, 2) == ("0,1", "2,3").
    Raises LaunchError where the run wants more than there are.
    """
    if not pool:
        return ()
    if (problem := too_few_gpus(len(pool), ranks, workers, tensor_parallel)) is not None:
        raise LaunchError(problem)
    if len(pool) == 1:
        return (pool[0],) * (1 + workers)
    starts = range(ranks, ranks + workers * tensor_parallel, tensor_parallel)
    engines = (pool[start : start + tensor_parallel] for start in starts)
    return (",".join(pool[:ranks]), *map(",".join, engines))


def threads_per_worker(workers: int, ranks: int, overlap: bool) -> int:
    """CPU threads of each process: rollout and training share the cores only if they overlap."""
    busy = workers + ranks if overlap else max(workers, ranks)
    return max(1, core_count() // busy)


def _environment(threads: int) -> dict[str, str]:
    # Threads that spin while they wait take the cores from those with work (measured: 5 to 30
    # times slower beside another busy process).
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
    }


def _spawn(
    command: Sequence[str], environment: dict[str, str], name: str, log: Path
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        output.write(f"{_START_MARK} {name}\n".encode())
        output.flush()
        return start_guarded(command, output, environment)


def _how_it_ended(code: int, codes: Collection[int]) -> str:
    """A worker's exit code; `codes` has those of its ranks too. A worker or rank that was killed
    gets a hint: we did not kill it."""
    if not {_KILLED, -signal.SIGKILL} & set(codes):
        return f"exit code {code}"
    return (
        f"exit code {code} (killed by SIGKILL: perhaps by the kernel, which ran out of memory and "
        "says so in `dmesg`; then lower actor_rollout_ref.rollout.cpu_kv_cache_gib, "
        "actor_rollout_ref.rollout.trace_buffer_mib or launch.rollout_workers)"
    )


def _last_start(log: Path) -> str:
    """The log of the worker's last start."""
    text = log.read_text(errors="replace").rpartition(_START_MARK)[2]
    return text.partition("\n")[2]
