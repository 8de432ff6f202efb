"""The result of a memory estimate, and its presentation as text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import InputError

GIB = 1 << 30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB)", re.IGNORECASE)
_UNITS = {"gib": GIB, "gb": 10**9}


@dataclass(frozen=True)
class MemoryPart:
    """A part of the memory in use. Example: MemoryPart('optimizer state', 21_000_000_000)."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Memory:
    """The estimated memory of a run at its peak."""

    local: bool
    """True if ranks use the CPU and Megatron-core's local layers; False if they use GPUs."""
    parameters: int
    """Number of parameters in the model."""
    stage: int
    """The pipeline stage of the fullest training rank."""
    parts: tuple[MemoryPart, ...]
    """Parts of the fullest training rank's memory at the peak of a step. The peak is in an update
    or in a pass without gradients."""
    host_checkpoint: int
    """Host memory, in bytes, that the ranks of one node need to write a checkpoint."""
    host_older: int
    """Host memory, in bytes, for the copies of older weights that the ranks of one node keep."""
    engine: tuple[MemoryPart, ...]
    """Parts of an engine process's memory: the weights, and the cache for one sequence of maximum
    length."""
    training_gpus: int
    """Number of training ranks, each of which has its own GPU."""
    rollout_gpus: int
    """Number of processes of all engines together, each of which has its own GPU."""

    @property
    def training(self) -> int:
        """Number of bytes that the fullest training rank needs."""
        return sum(part.bytes for part in self.parts)

    @property
    def rollout(self) -> int:
        """Minimum number of bytes that each process of an engine needs."""
        return sum(part.bytes for part in self.engine)


def parse_memory(text: str) -> int:
    """Return the number of bytes in a size such as 80GiB, 80GB or 79.6GiB.

    Raises InputError if the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else round(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise InputError(
            [f"--gpu-memory: found {text!r}, expected a size in GiB or GB; give one such as 80GiB"]
        )
    return size


def memory_lines(memory: Memory) -> list[tuple[str, str]]:
    """Return the lines that `retrace check` prints, each as a name and a text."""
    of = "rank" if memory.local else "GPU"
    older = f", and {shown(memory.host_older)} for older weights" if memory.host_older else ""
    gpus = memory.training_gpus + memory.rollout_gpus
    total = f"{gpus}: {memory.training_gpus} for training, {memory.rollout_gpus} for rollout"
    return [
        *([] if memory.local else [("GPUs", total)]),
        (
            "memory",
            f"about {shown(memory.training)} on the fullest training {of}: {listed(memory.parts)}",
        ),
        (
            "host",
            f"about {shown(memory.host_checkpoint)} on each training node, for a checkpoint{older}",
        ),
        (
            "engine",
            f"at least {shown(memory.rollout)} "
            f"{'in each process' if memory.local else 'on each GPU'} of an engine: "
            f"{listed(memory.engine)}",
        ),
    ]


def listed(parts: Sequence[MemoryPart]) -> str:
    """Return the parts with their sizes as text."""
    return ", ".join(f"{part.name} {shown(part.bytes)}" for part in parts)


def shown(size: int) -> str:
    """Return a number of bytes as text, in the units that are usual for GPUs."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):,.1f} MiB"
