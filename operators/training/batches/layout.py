"""The layout: which rank trains which sample in which micro-batch, from manifest and config alone.

Samples are named by their rows in the manifest, whose order is that of the step's files: shard
after shard, a group's samples next to each other.

Mini-batches of epoch 0: of each M neighbouring groups (M: the number of mini-batches), every
mini-batch gets one, chosen by a hash of (seed, step). So every mini-batch draws evenly from the
step's files, and none depends on the parallel layout. Within a mini-batch the rows stay in order
and are cut into equal ranges, one per data-parallel rank: a rank's samples of the whole step lie
together in the files, so it fetches few other row groups.

A sample stays on its data-parallel rank for the whole step, so that old log-probs and R2 routes are
where they are needed. In later epochs each rank reorders its own samples by a hash that includes
the epoch, as verl does.

Letters: N samples of a step, D data-parallel ranks, M mini-batches.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LENGTH_MULTIPLE = 8
"""Padded lengths are multiples of this, so that shapes repeat and suit tensor cores."""

FILLER = -1
"""A row of a micro-batch without a sample."""

Rows = npt.NDArray[np.int64]
"""Rows of the manifest."""


@dataclass(frozen=True)
class LayoutRules:
    """The settings that decide the layout."""

    seed: int
    mini_batch_groups: int
    """Maximum prompts per optimizer step, over all ranks; a prompt's samples stay together."""
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
    shares: tuple[Rows, ...]
    """By data-parallel rank: rows [micro-batches, samples], FILLER where there is no sample."""

    def rows(self, dp_rank: int) -> Rows:
        """The samples of one data-parallel rank, without fillers."""
        share = self.shares[dp_rank]
        rows: Rows = share[share != FILLER]
        return rows


@dataclass(frozen=True)
class Layout:
    """The mini-batches of a step, in the order of training."""

    rules: LayoutRules
    mini_batches: tuple[MiniBatch, ...]

    def epoch(self, epoch: int) -> list[MiniBatch]:
        """The mini-batches of one epoch."""
        return [batch for batch in self.mini_batches if batch.epoch == epoch]

    def rows(self, dp_rank: int) -> Rows:
        """A data-parallel rank's samples in this step, in the order of epoch 0."""
        return np.concatenate([batch.rows(dp_rank) for batch in self.epoch(0)])

    @property
    def sha256(self) -> str:
        """Digest of the whole layout."""
        digest = hashlib.sha256(repr(self.rules).encode())
        for batch in self.mini_batches:
            shapes = [share.shape for share in batch.shares]
            digest.update(f"{batch.epoch} {batch.length} {shapes}".encode())
            for share in batch.shares:
                digest.update(np.ascontiguousarray(share, "<i8").data)
        return digest.hexdigest()


def make_layout(
    step: int, groups_N: npt.NDArray[np.int64], lengths_N: npt.NDArray[np.int64], rules: LayoutRules
) -> Layout:
    """The layout of a step, from columns of its manifest.

    `groups_N` holds a number per sample, equal for neighbours of the same group; `lengths_N` holds
    numbers of positions (S - 1). Raises ValueError without samples.
    """
    if not len(groups_N):
        raise ValueError(f"step {step}: the manifest has no samples, there is nothing to train on")
    cuts = _mini_batch_rows(step, groups_N, rules)
    shares = [np.array_split(rows, rules.data_parallel) for rows in cuts]
    mini_batches = [_mini_batch(0, share, lengths_N, rules) for share in shares]
    for epoch in range(1, rules.epochs):
        salt = _salt(rules.seed, step, epoch)
        again = [_reshuffled([share[d] for share in shares], salt) for d in range(len(shares[0]))]
        mini_batches += [
            _mini_batch(epoch, share, lengths_N, rules) for share in zip(*again, strict=True)
        ]
    return Layout(rules, tuple(mini_batches))


def _mini_batch_rows(step: int, groups_N: npt.NDArray[np.int64], rules: LayoutRules) -> list[Rows]:
    """The rows of each mini-batch in epoch 0, ascending."""
    begins_N = np.concatenate([[True], groups_N[1:] != groups_N[:-1]])
    group_N = np.cumsum(begins_N) - 1
    count = int(group_N[-1]) + 1
    batches = -(-count // rules.mini_batch_groups)
    numbers = np.arange(count)
    order = np.lexsort((_hashes(numbers, _salt(rules.seed, step, 0)), numbers // batches))
    batch_of_group = np.empty(count, np.int64)
    batch_of_group[order] = numbers % batches
    batch_N = batch_of_group[group_N]
    sizes = np.bincount(batch_N, minlength=batches)
    return np.split(np.argsort(batch_N, kind="stable"), np.cumsum(sizes)[:-1])


def _reshuffled(rows: list[Rows], salt: int) -> list[Rows]:
    """One rank's samples in a new order, cut into shares of the same sizes as before."""
    together = np.concatenate(rows)
    order = np.argsort(_hashes(together, salt), kind="stable")
    return np.split(together[order], np.cumsum([len(share) for share in rows])[:-1])


def _salt(seed: int, step: int, epoch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{epoch}".encode()).digest()[:8], "little")


def _hashes(numbers: Rows, salt: int) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each number: splitmix64 (Steele, Lea, Flood 2014), seeded by the salt.

    Not a numpy generator, whose stream may change between versions.
    """
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(salt)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return hashed


def _mini_batch(
    epoch: int,
    share: tuple[Rows, ...] | list[Rows],
    lengths_N: npt.NDArray[np.int64],
    rules: LayoutRules,
) -> MiniBatch:
    most = max(len(rows) for rows in share)
    count = _up(-(-most // rules.micro_batch_samples), rules.micro_batch_multiple)
    size = -(-most // count)  # as even as possible, for the fewest fillers
    longest = int(lengths_N[np.concatenate(share)].max())
    return MiniBatch(
        epoch=epoch,
        length=_up(longest, LENGTH_MULTIPLE * rules.sequence_slices),
        shares=tuple(_micro_batches(rows, count, size) for rows in share),
    )


def _micro_batches(rows: Rows, count: int, size: int) -> Rows:
    share = np.full(count * size, FILLER, np.int64)
    share[: len(rows)] = rows
    return share.reshape(count, size)


def _up(number: int, multiple: int) -> int:
    return max(-(-number // multiple), 1) * multiple
