"""The result of an estimate: what a run needs of memory, and how it is shown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import InputError

GIB = 1 << 30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB)", re.IGNORECASE)
_UNITS = {"gib": GIB, "gb": 10**9}


@dataclass(frozen=True)
class MemoryPart:
    """A part of a processor's memory. Example: MemoryPart('optimizer state', 21_000_000_000)."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Memory:
    """What a run needs of memory, at its fullest, by estimate."""

    local: bool
    """Of ranks on CPU, with Megatron-core's local layers; else of GPUs."""
    parameters: int
    """Numbers in the model's weights."""
    stage: int
    """The pipeline stage of the fullest training rank."""
    parts: tuple[MemoryPart, ...]
    """Of that rank at the peak of a step: in an update, or in a log-prob pass."""
    host_checkpoint: int
    """Bytes of host memory that the ranks of one node need to write a checkpoint."""
    engine: tuple[MemoryPart, ...]
    """Of each process of a rollout engine: its weights, and the cache of one longest sequence."""

    @property
    def training(self) -> int:
        """Bytes of the fullest training rank."""
        return sum(part.bytes for part in self.parts)

    @property
    def rollout(self) -> int:
        """Bytes that each process of an engine needs at least."""
        return sum(part.bytes for part in self.engine)


def parse_memory(text: str) -> int:
    """Bytes of a size like 80GiB, 80GB or 79.6GiB. Raises InputError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else round(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise InputError(
            [f"--gpu-memory: found {text!r}, expected a size in GiB or GB; write one like 80GiB"]
        )
    return size


def memory_lines(memory: Memory) -> list[tuple[str, str]]:
    """What `retrace check` prints: names and texts."""
    of = "rank" if memory.local else "GPU"
    return [
        (
            "memory",
            f"about {shown(memory.training)} of the fullest training {of}: {listed(memory.parts)}",
        ),
        ("host", f"about {shown(memory.host_checkpoint)} of a training node for a checkpoint"),
        (
            "engine",
            f"at least {shown(memory.rollout)} of each {'process' if memory.local else 'GPU'} of "
            f"an engine: {listed(memory.engine)}",
        ),
    ]


def listed(parts: Sequence[MemoryPart]) -> str:
    """Parts with their sizes."""
    return ", ".join(f"{part.name} {shown(part.bytes)}" for part in parts)


def shown(size: int) -> str:
    """Bytes for people, in the units in which GPUs are measured."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):,.1f} MiB"
