"""Derives pseudo-random numbers that are the same on every machine and in every layout."""

import hashlib

import numpy as np
import numpy.typing as npt


def salt(*names: object) -> int:
    """Return a 64-bit number derived from `names`. Example: salt(seed, step, epoch)."""
    text = "/".join(str(name) for name in names)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def hashes(numbers: npt.NDArray[np.integer], seed: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each number; different numbers get different hashes.

    The function is splitmix64 (Steele, Lea, Flood 2014), seeded by a salt. We do not use a numpy
    generator, because its stream may change between numpy versions.
    """
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return hashed
