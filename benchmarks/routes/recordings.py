"""Routes to measure on: recorded ones, and ones drawn by rules.

Letters: T rows of a sample, L MoE layers, K experts per token (top-k), E experts.
"""

import hashlib
import itertools
import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

RECORDED = Path(__file__).parents[1] / "data" / "routes.npy.xz"


@dataclass(frozen=True)
class Recording:
    """Routes of some samples, each row in the router's order."""

    name: str
    experts: int
    routes: tuple[npt.NDArray[Any], ...]
    """Per sample [T, L, K], uint8 up to 256 experts, uint16 above."""
    prompts: tuple[int, ...]
    """Prompt tokens of each sample."""
    groups: tuple[int, ...]
    """Of each sample: samples with the same number have the same prompt."""

    @property
    def layers(self) -> int:
        """L."""
        return self.routes[0].shape[1]

    @property
    def topk(self) -> int:
        """K."""
        return self.routes[0].shape[2]

    @property
    def tokens(self) -> int:
        """Rows of all samples."""
        return sum(len(routes_TLK) for routes_TLK in self.routes)

    @property
    def raw_bytes(self) -> int:
        """With one byte per expert id, two above 256 experts: what MB/s count."""
        return sum(routes_TLK.nbytes for routes_TLK in self.routes)

    @property
    def bound(self) -> float:
        """Bytes that a uniformly random set of K of E experts holds: log2(C(E, K)) / 8."""
        return math.log2(math.comb(self.experts, self.topk)) / 8


def recorded(path: Path = RECORDED) -> Recording:
    """The routes of benchmarks/data, see the README there. Each sample has a prompt of its own."""
    with lzma.open(path) as source:
        routes_SLTK = np.load(source)
    samples, _, rows, _ = routes_SLTK.shape
    routes = tuple(np.ascontiguousarray(sample.swapaxes(0, 1)) for sample in routes_SLTK)
    return Recording("recorded", 128, routes, (rows // 4,) * samples, tuple(range(samples)))


def uniform(
    experts: int, topk: int, samples: int = 64, rows: int = 512, layers: int = 6
) -> Recording:
    """Sets drawn uniformly: nothing can code them below `Recording.bound`."""
    rng = np.random.default_rng(experts)
    dtype = np.uint8 if experts <= 256 else np.uint16
    routes = []
    for _ in range(samples):
        keys_TLE = rng.random((rows, layers, experts), np.float32)
        sets_TLK = np.argpartition(keys_TLE, topk, axis=-1)[..., :topk]
        routes.append(rng.permuted(sets_TLK, axis=-1).astype(dtype))
    name = f"uniform, top-{topk} of {experts}"
    return Recording(name, experts, tuple(routes), (rows // 4,) * samples, tuple(range(samples)))


def skewed(by_id: bool, samples: int = 64, rows: int = 512, layers: int = 6) -> Recording:
    """Top-8 of 128 experts whose popularity falls as Zipf's law says, with neighbours alike.

    Each expert's score is its popularity's logarithm and a part of its own that changes slowly
    from token to token (correlation 0.8), as a text's subject does. `by_id`: the most popular
    experts have the lowest ids, else an order of each layer's own.
    """
    experts, topk, kept = 128, 8, 0.8
    rng = np.random.default_rng(7)
    ranks = np.arange(experts)
    popularity_LE = np.stack([ranks if by_id else rng.permutation(ranks) for _ in range(layers)])
    score_LE = -np.log1p(popularity_LE).astype(np.float32)
    routes = []
    for _ in range(samples):
        own_TLE = rng.standard_normal((rows, layers, experts), np.float32)
        for t in range(1, rows):
            own_TLE[t] = kept * own_TLE[t - 1] + math.sqrt(1 - kept**2) * own_TLE[t]
        sets_TLK = np.argpartition(-(own_TLE + score_LE), topk, axis=-1)[..., :topk]
        routes.append(rng.permuted(sets_TLK, axis=-1).astype(np.uint8))
    name = "skewed by id" if by_id else "skewed"
    prompts = (rows // 4,) * samples
    return Recording(name, experts, tuple(routes), prompts, tuple(range(samples)))


def set_digests(arrays: Sequence[npt.NDArray[Any]]) -> list[str]:
    """One digest per sample of its sets; neither the order of ids nor their type matters."""
    return [
        hashlib.sha256(np.sort(array, axis=-1).astype("<u2", order="C").tobytes()).hexdigest()
        for array in arrays
    ]


def same_sets(name: str, found: Sequence[str], expected: Sequence[str]) -> None:
    """Raise ValueError unless digests of samples' sets are equal."""
    if found != expected:
        different = sum(a != b for a, b in itertools.zip_longest(found, expected))
        raise ValueError(f"{name}: {different} of {len(expected)} samples came out different")


def widened(recording: Recording, layers: int, tokens: int) -> Recording:
    """The recording repeated until it has `layers` layers and at least `tokens` tokens.

    In every repetition the experts have other names (a random permutation of the ids), so that no
    coder can profit from the repetition itself.
    """
    rng = np.random.default_rng(0)
    across = -(-layers // recording.layers)
    blocks = max(1, -(-tokens // recording.tokens))
    found: list[npt.NDArray[Any]] = []
    groups: list[int] = []
    for block in range(blocks):
        names = [rng.permutation(recording.experts) for _ in range(across)]
        names_of = [name.astype(recording.routes[0].dtype) for name in names]
        if block == 0:
            names_of[0] = np.arange(recording.experts, dtype=recording.routes[0].dtype)
        for routes_TLK, group in zip(recording.routes, recording.groups, strict=True):
            wide = np.concatenate([renamed[routes_TLK] for renamed in names_of], axis=1)
            found.append(np.ascontiguousarray(wide[:, :layers]))
            groups.append(group + block * (max(recording.groups) + 1))
    prompts = recording.prompts * blocks
    return Recording(recording.name, recording.experts, tuple(found), prompts, tuple(groups))
