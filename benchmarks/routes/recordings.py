"""Routes for measurements, either recorded or randomly generated.

Dimensions: T is the number of rows in a sample, L the number of MoE layers, K the number of experts
per token (top-k), and E the number of experts.
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
    """Routes of some samples, with the ids of each row in the router's order."""

    name: str
    experts: int
    routes: tuple[npt.NDArray[Any], ...]
    """Routes [T, L, K] of each sample: uint8 for up to 256 experts, uint16 for more."""
    prompts: tuple[int, ...]
    """Number of prompt tokens of each sample."""
    groups: tuple[int, ...]
    """Group number of each sample; samples of a group have the same prompt."""

    @property
    def layers(self) -> int:
        """Number of MoE layers, L."""
        return self.routes[0].shape[1]

    @property
    def topk(self) -> int:
        """Number of experts per token, K."""
        return self.routes[0].shape[2]

    @property
    def tokens(self) -> int:
        """Number of rows in all samples together."""
        return sum(len(routes_TLK) for routes_TLK in self.routes)

    @property
    def raw_bytes(self) -> int:
        """Size of the raw routes: one byte per expert id, or two if there are over 256 experts."""
        return sum(routes_TLK.nbytes for routes_TLK in self.routes)

    @property
    def bound(self) -> float:
        """Entropy in bytes of a uniformly random set of K out of E experts: log2(C(E, K)) / 8."""
        return math.log2(math.comb(self.experts, self.topk)) / 8


def recorded(path: Path = RECORDED) -> Recording:
    """Return the routes of benchmarks/data (see its README); each sample has a separate prompt."""
    with lzma.open(path) as source:
        routes_SLTK = np.load(source)
    samples, _, rows, _ = routes_SLTK.shape
    routes = tuple(np.ascontiguousarray(sample.swapaxes(0, 1)) for sample in routes_SLTK)
    return Recording("recorded", 128, routes, (rows // 4,) * samples, tuple(range(samples)))


def uniform(
    experts: int, topk: int, samples: int = 64, rows: int = 512, layers: int = 6
) -> Recording:
    """Return uniformly random sets, which no coding can make smaller than `Recording.bound`.

    Args:
        experts: Number of experts.
        topk: Experts per token.
        samples: Number of samples.
        rows: Rows of each sample.
        layers: Number of layers.
    """
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
    """Return routes of 128 experts with Zipf-distributed popularity; adjacent rows are similar.

    Each token uses the top 8. An expert's score is the logarithm of its popularity plus a random
    part, which changes slowly from token to token (correlation 0.8), like the subject of a text.

    Args:
        by_id: Whether the most popular experts have the lowest ids; otherwise each layer has a
            random order.
        samples: Number of samples.
        rows: Rows of each sample.
        layers: Number of layers.
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
    """Return a digest of each sample's sets, independent of the order and type of the ids."""
    return [
        hashlib.sha256(np.sort(array, axis=-1).astype("<u2", order="C").tobytes()).hexdigest()
        for array in arrays
    ]


def same_sets(name: str, found: Sequence[str], expected: Sequence[str]) -> None:
    """Compare the digests of the decoded and the original sets.

    Args:
        name: Name of the format, for the message.
        found: Digests of the decoded samples.
        expected: Digests of the original samples.

    Raises:
        ValueError: The digests differ.
    """
    if found != expected:
        different = sum(a != b for a, b in itertools.zip_longest(found, expected))
        raise ValueError(f"{name}: {different} of {len(expected)} samples differ from the original")


def widened(recording: Recording, layers: int, tokens: int) -> Recording:
    """Repeat a recording over more layers and tokens.

    Each repetition renames the experts by a random permutation of the ids, so that no coder can
    profit from the repetition. The original routes come first, unchanged.

    Args:
        recording: Recording to repeat.
        layers: Number of layers in the result.
        tokens: Minimum number of tokens in the result.
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
