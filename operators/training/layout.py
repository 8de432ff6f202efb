"""Which rank trains which sample in which micro-batch: a pure function of manifest and config.

Samples are sorted by id and ordered by a hash of (seed, step, id). Consecutive runs of that order
are the mini-batches of epoch 0; each is dealt to the data-parallel ranks in turn. So the
mini-batches do not depend on the parallel layout, and any rank can compute any other's share.

A sample stays on its data-parallel rank for the whole step: old log-probs and R2 routes are where
they are needed. In later epochs each rank reorders its own samples by a hash that includes the
epoch, as verl does.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

LENGTH_MULTIPLE = 8
"""Padded lengths are rounded up to this, so that shapes repeat and tensor cores are fed."""


@dataclass(frozen=True)
class LayoutRules:
    """What of the config decides the layout."""

    seed: int
    mini_batch_samples: int
    """Samples per optimizer step, over all ranks."""
    micro_batch_samples: int
    """Largest number of samples per micro-batch on one data-parallel rank."""
    epochs: int
    data_parallel: int
    micro_batch_multiple: int = 1
    """Virtual pipeline stages need a multiple of PP micro-batches."""
    sequence_slices: int = 1
    """Sequence parallelism cuts each row into this many equal slices."""


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer step, by data-parallel rank and micro-batch.

    Every rank has the same number of micro-batches of the same size and padded length: pipeline
    stages exchange tensors of one shape, and expert parallelism gathers over ranks that hold
    different samples.
    """

    epoch: int
    length: int
    """N: padded number of positions of each row."""
    shares: tuple[tuple[tuple[str | None, ...], ...], ...]
    """[data-parallel rank][micro-batch][row] -> sample id; None is a filler."""

    def ids(self, dp_rank: int) -> list[str]:
        """The samples of one data-parallel rank, without fillers."""
        return [id for micro_batch in self.shares[dp_rank] for id in micro_batch if id is not None]


@dataclass(frozen=True)
class Layout:
    """A step's training, in the order it happens."""

    rules: LayoutRules
    mini_batches: tuple[MiniBatch, ...]

    def epoch(self, epoch: int) -> list[MiniBatch]:
        """The mini-batches of one epoch."""
        return [batch for batch in self.mini_batches if batch.epoch == epoch]

    def ids(self, dp_rank: int) -> list[str]:
        """A data-parallel rank's samples in this step, in the order of epoch 0."""
        return [id for batch in self.epoch(0) for id in batch.ids(dp_rank)]

    @property
    def sha256(self) -> str:
        """Digest of the whole layout."""
        text = json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def make_layout(step: int, lengths: Mapping[str, int], rules: LayoutRules) -> Layout:
    """The layout of a step. `lengths` are positions (S - 1) by sample id.

    Raises ValueError without samples.
    """
    if not lengths:
        raise ValueError(f"step {step}: the manifest has no samples, there is nothing to train on")
    order = _shuffled(lengths, f"{rules.seed}/{step}/0")
    size = rules.mini_batch_samples
    cuts = [order[start : start + size] for start in range(0, len(order), size)]
    shares = [[cut[d :: rules.data_parallel] for d in range(rules.data_parallel)] for cut in cuts]
    mini_batches = [_mini_batch(0, share, lengths, rules) for share in shares]
    for epoch in range(1, rules.epochs):
        again = _reshuffled(shares, f"{rules.seed}/{step}/{epoch}")
        mini_batches += [_mini_batch(epoch, share, lengths, rules) for share in again]
    return Layout(rules, tuple(mini_batches))


def _shuffled(ids: Mapping[str, int] | Sequence[str], salt: str) -> list[str]:
    # A hash, not a generator: numpy does not promise the same stream in every version.
    return sorted(ids, key=lambda id: (hashlib.sha256(f"{salt}/{id}".encode()).digest(), id))


def _reshuffled(shares: list[list[list[str]]], salt: str) -> list[list[list[str]]]:
    """Each rank's samples in a new order, cut into shares of the sizes they had."""
    again: list[list[list[str]]] = [[] for _ in shares]
    for rank in range(len(shares[0])):
        order = iter(_shuffled([id for share in shares for id in share[rank]], salt))
        for share, new in zip(shares, again, strict=True):
            new.append([next(order) for _ in share[rank]])
    return again


def _mini_batch(
    epoch: int, share: Sequence[Sequence[str]], lengths: Mapping[str, int], rules: LayoutRules
) -> MiniBatch:
    most = max(len(ids) for ids in share)
    count = _up(-(-most // rules.micro_batch_samples), rules.micro_batch_multiple)
    size = -(-most // count)  # as even as possible: fewest fillers
    return MiniBatch(
        epoch=epoch,
        length=_up(
            max(max((lengths[id] for id in ids), default=0) for ids in share),
            LENGTH_MULTIPLE * rules.sequence_slices,
        ),
        shares=tuple(_micro_batches(ids, count, size) for ids in share),
    )


def _micro_batches(ids: Sequence[str], count: int, size: int) -> tuple[tuple[str | None, ...], ...]:
    rows = [*ids, *[None] * (count * size - len(ids))]
    return tuple(tuple(rows[start : start + size]) for start in range(0, len(rows), size))


def _up(number: int, multiple: int) -> int:
    return max(-(-number // multiple), 1) * multiple
