"""Measures the times of a step's parts, memory peaks and device utilisation."""

import json
import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import torch

from operators.training.measured import Measured
from pipeline.errors import InputError
from pipeline.metrics.metric import Metrics
from pipeline.model.fields import complete
from pipeline.model.flops import BACKWARD_AND_FORWARD, forward_flops, peak_flops
from pipeline.model.widths import Widths, widths_of

logger = logging.getLogger(__name__)

_KIB, _GIB = 1 << 10, 1 << 30

TIMES = (
    "timing_s/trace_wait",
    "timing_s/log_probs",
    "timing_s/old_log_prob",
    "timing_s/native_log_prob",
    "timing_s/older_log_prob",
    "timing_s/ref",
    "timing_s/values",
    "timing_s/adv",
    "timing_s/update_critic",
    "timing_s/update_actor",
)
"""The parts of a step whose times every step reports; None for a part that was omitted."""


@contextmanager
def timed(measured: dict[str, Measured], name: str) -> Iterator[None]:
    """Measure the time that the `with` block takes on the slowest rank.

    Args:
        measured: This rank's values, to which the seconds are added.
        name: The metric's name.
    """
    started = time.monotonic()
    yield
    measured[name] = Measured(max, time.monotonic() - started)


def memory_peaks() -> Metrics:
    """Return this process's memory peaks and the machine's current memory use, in GiB."""
    peaks: Metrics = {
        "perf/max_resident_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB / _GIB,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / _GIB,
        "perf/max_memory_allocated_gb": None,
        "perf/max_memory_reserved_gb": None,
    }
    if torch.cuda.is_available():
        peaks["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / _GIB
        peaks["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / _GIB
    return peaks


@dataclass(frozen=True)
class Devices:
    """The devices of a run. Example: Devices(ranks=8, engines=4, peak=989e12, widths=...)."""

    ranks: int
    """Number of training ranks."""
    engines: int
    """Number of engine processes: rollout workers times their tensor-parallel size."""
    peak: float | None
    """Peak operations per second of one rank's GPU; None on CPU or for an unknown GPU."""
    widths: Widths | None
    """Widths of the model; None if its operations cannot be counted."""

    def speed(self, columns: pa.Table, epochs: int, metrics: Metrics) -> Metrics:
        """Return tokens per second, and the share of the peak that training reached.

        Args:
            columns: The manifest's columns, one row per sample: `StepData.columns`.
            epochs: Number of update epochs in the step.
            metrics: The step's other metrics, which include its times.
        """
        tokens = metrics["perf/total_num_tokens"]
        step_s = metrics["timing_s/step"]
        rate = _by(tokens, step_s)
        found: Metrics = {
            "perf/time_per_step": step_s,
            "perf/throughput": None if rate is None else rate / (self.ranks + self.engines),
            "perf/train_tokens_per_s": _by(tokens, metrics["timing_s/train"]),
            "perf/mfu/actor": None,
            "perf/mfu/actor_infer": None,
        }
        if self.peak is None or self.widths is None:
            return found
        forward = forward_flops(self.widths, columns["rows_total"].to_numpy())
        possible = self.peak * self.ranks
        updates = _by(BACKWARD_AND_FORWARD * epochs * forward, metrics["timing_s/update_actor"])
        infer = _by(forward, metrics["timing_s/old_log_prob"])
        found["perf/mfu/actor"] = None if updates is None else updates / possible
        found["perf/mfu/actor_infer"] = None if infer is None else infer / possible
        return found


def find_devices(ranks: int, engines: int, folder: Path) -> Devices:
    """Return the devices of this run.

    Args:
        ranks: Number of training ranks.
        engines: Number of engine processes.
        folder: The folder with the model's config.json.
    """
    peak, widths = None, None
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        peak = peak_flops(name)
        try:
            widths = widths_of(complete(json.loads((folder / "config.json").read_text())))
        except InputError as error:
            logger.info("perf/mfu is not measured: %s", error)
        if peak is None:
            logger.info("perf/mfu is not measured: the peak speed of %s is unknown", name)
    return Devices(ranks, engines, peak, widths)


def _by(amount: float | None, seconds: float | None) -> float | None:
    return amount / seconds if amount is not None and seconds else None
