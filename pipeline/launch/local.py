"""Workers as local processes, each under a guard that ends them when the launcher ends."""

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
"""The guard's exit code for a command that SIGKILL ended."""


_WORTH_THREADS = 256
"""The smallest width of hidden states with which threads compute faster than they wait for each
other. With two threads instead of one, an expert of width 64 took 1.7 times as long for 528 tokens,
and an expert of width 128 took 1.3 times as long. With width 512, two threads were faster."""


@dataclass
class _Worker:
    stage: Stage
    index: int
    log: Path
    process: subprocess.Popen[bytes]
    ended: bool = False


@dataclass
class LocalWorkers:
    """The worker processes of all stages. Several threads may call `check` at the same time."""

    folder: Path
    """Folder of the log files <stage>-<index>.log, to which each restart appends."""
    show: Callable[[str], None]
    """Shows a line about a restarted worker."""
    progress_folder: Path | None = None
    """Folder of the progress files <stage>-<index>.json; None if no progress is written."""
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
        """Restart workers that ended with an error.

        Always return False, because one machine has no queue. Raises StageFailedError after too
        many restarts, or StageLastingError if a worker's error would recur after a restart.
        """
        with self._lock:
            if self._failure is not None:  # raised again in every waiting thread
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
                        "and was not restarted, because the error would recur"
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
        """Wait `grace_s` seconds for the workers to end, then kill those still running.

        Later calls of `check` fail, so that no thread waits for workers that no longer exist.
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
        """Return False, because local workers end with the process that started them."""
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
    """Start stages as local processes, and end all of them after the block.

    Args:
        folder: The folder for the workers' log files.
        stages: The stages to start, in this order.
        show: Shows a line about a restarted worker.
        progress_folder: The folder for the workers' progress files; None if no progress is written.
    """
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
    """Return the stage of an attempt's rollout workers.

    Args:
        run_uri: The run's root in the store.
        attempt: The attempt's number.
        workers: The number of rollout workers.
        max_restarts: Maximum number of restarts of all workers together.
        threads: CPU threads per worker.
        devices: CUDA_VISIBLE_DEVICES for each worker; empty without GPUs.
    """
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
    """Return the stage of an attempt's training ranks: one torchrun on this machine.

    Args:
        run_uri: The run's root in the store.
        attempt: The attempt's number.
        ranks: The number of training ranks.
        max_restarts: Maximum number of restarts of the gang.
        threads: CPU threads per rank.
        devices: CUDA_VISIBLE_DEVICES for the gang, as one element; empty without GPUs.
    """
    command = training_command(sys.executable, ["--standalone"], ranks, run_uri, attempt)
    again = partial(repeats_of, run_uri)
    return Stage("training", (command,), max_restarts, _environment(threads), again, devices)


def devices_of(
    pool: Sequence[str], ranks: int, workers: int, tensor_parallel: int
) -> tuple[str, ...]:
    """Return CUDA_VISIBLE_DEVICES for the training gang, and then for each rollout worker.

    The gang and the workers share a GPU only if the machine has just one.
    Example: devices_of(("0", "1", "2", "3"), 2, 1, 2) == ("0,1", "2,3").

    Args:
        pool: The machine's GPUs. If it has none, the result is empty.
        ranks: The number of training ranks.
        workers: The number of rollout workers.
        tensor_parallel: GPUs per rollout worker.

    Raises:
        LaunchError: The run needs more GPUs than the machine has.
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


def threads_per_worker(workers: int, ranks: int, overlap: bool, hidden: int) -> int:
    """Return the number of CPU threads per process: one for a tiny model.

    Args:
        workers: The number of rollout workers.
        ranks: The number of training ranks.
        overlap: Whether rollout and training run at the same time, and so share the cores.
        hidden: The width of the model's hidden states.
    """
    if hidden < _WORTH_THREADS:
        return 1
    busy = workers + ranks if overlap else max(workers, ranks)
    return max(1, core_count() // busy)


def _environment(threads: int) -> dict[str, str]:
    # Threads that spin while they wait take cores away from threads that have work. When another
    # busy process ran on the machine, workers with spinning threads were 5 to 30 times slower.
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
    """Describe a worker's exit code, with a hint if the worker or one of its ranks was killed.

    `codes` contains `code` and the exit codes of the worker's ranks. The launcher itself has
    not killed any of these processes.
    """
    if not {_KILLED, -signal.SIGKILL} & set(codes):
        return f"exit code {code}"
    return (
        f"exit code {code} (killed by SIGKILL: if `dmesg` shows that the kernel ran out of memory, "
        "lower actor_rollout_ref.rollout.cpu_kv_cache_gib, "
        "actor_rollout_ref.rollout.trace_buffer_mib or launch.rollout_workers)"
    )


def _last_start(log: Path) -> str:
    """Return the part of a log that was written since the worker's last start."""
    text = log.read_text(errors="replace").rpartition(_START_MARK)[2]
    return text.partition("\n")[2]
