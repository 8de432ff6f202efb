"""Weights of a policy of any size, and of its next version, generated with little memory.

Tensors are parts of one pool of bfloat16 weights of scale 0.02, each taken from a different place.
The next version's tensors are at the same places in a second pool, which is the first pool after
four Adam steps with a learning rate of 1e-6.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEARNING_RATE, STEPS = 1e-6, 4
"""Adam's learning rate, and the number of Adam's steps between two versions."""
EMBEDDING, EXPERT = 64 << 20, 3 << 20
"""Sizes in bytes of the largest tensor (which takes at most a sixteenth of a policy) and of each of
the others."""
POOL = 1 << 24
"""Number of weights in the pool."""
STRIDE = 977 * 4096
"""Distance between the positions of two consecutive tensors in the pool, in weights."""


_KEPT = "RETRACE_BENCHMARK_POOLS"


class Piece(NamedTuple):
    """A tensor. Example: Piece('layers.3.weight', 3 << 20, 12005376)."""

    name: str
    size: int
    """Size in bytes."""
    place: int
    """Index of its first weight in the pool."""

    def content(self, version: int) -> memoryview:
        """Return the bytes of the tensor in version 0 or 1."""
        pool_W = pools()[version]
        first = self.place % POOL
        return memoryview(pool_W[first : first + self.size // 2]).cast("B")


def pieces(size: int) -> list[Piece]:
    """Return the tensors of a policy of about `size` bytes."""
    largest = min(EMBEDDING, size // 16)
    found = [Piece("embed.weight", largest, 0)]
    for number in range((size - largest) // EXPERT):
        found.append(Piece(f"layers.{number}.weight", EXPERT, (number + 1) * STRIDE))
    return found


def of_rank(size: int, rank: int, ranks: int) -> list[Piece]:
    """Return the tensors that a rank writes; bytes are balanced across ranks.

    Args:
        size: Approximate size of the policy in bytes.
        rank: Index of the rank.
        ranks: Number of ranks.
    """
    loads = [0] * ranks
    mine = []
    for piece in pieces(size):
        owner = loads.index(min(loads))
        loads[owner] += piece.size
        if owner == rank:
            mine.append(piece)
    return mine


@cache
def pools() -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Return both versions of the pool, each with its beginning repeated at the end.

    Computing the pools takes seconds, so pools that `keep_pools` has saved are mapped into memory
    instead.
    """
    kept = os.environ.get(_KEPT)
    if kept is not None:
        return tuple(np.load(kept, mmap_mode="r"))
    rng = np.random.default_rng(0)
    weights_W = 0.02 * rng.standard_normal(POOL, np.float32)
    old_W = as_bfloat16(weights_W)
    adam_steps(rng, weights_W, STEPS, LEARNING_RATE)
    new_W = as_bfloat16(weights_W)
    return tuple(np.resize(one, POOL + EMBEDDING // 2) for one in (old_W, new_W))


@contextmanager
def keep_pools() -> Iterator[None]:
    """Save the pools for all processes that are started in the block."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pools.npy"
        np.save(path, np.stack(pools()))
        os.environ[_KEPT] = str(path)
        try:
            yield
        finally:
            del os.environ[_KEPT]


def contents(mine: list[Piece], version: int) -> Iterator[memoryview]:
    """Yield the bytes of each tensor in turn."""
    for piece in mine:
        yield piece.content(version)


def adam_steps(
    rng: np.random.Generator, weights_W: npt.NDArray[np.float32], steps: int, rate: float
) -> None:
    """Train float32 weights in place with Adam, on gradients that are noise plus a constant.

    Args:
        rng: Source of the gradients.
        weights_W: float32 weights, changed in place.
        steps: Number of optimizer steps.
        rate: Learning rate.
    """
    moment_W, square_W = np.zeros_like(weights_W), np.zeros_like(weights_W)
    mean_W = rng.standard_normal(weights_W.size, np.float32)
    for step in range(1, steps + 1):
        gradient_W = mean_W + rng.standard_normal(weights_W.size, np.float32)
        moment_W += np.float32(0.1) * (gradient_W - moment_W)
        square_W += np.float32(0.001) * (gradient_W**2 - square_W)
        moved_W = moment_W / np.float32(1 - 0.9**step)
        moved_W /= np.sqrt(square_W / np.float32(1 - 0.999**step)) + np.float32(1e-8)
        weights_W -= np.float32(rate) * moved_W


def as_bfloat16(weights_W: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return bfloat16 bit patterns, rounded to nearest even."""
    bits_W = weights_W.view(np.uint32)
    return ((bits_W + 0x7FFF + (bits_W >> 16 & 1)) >> 16).astype(np.uint16)
