"""The layout: which rank trains which sample in which micro-batch, from manifest and config alone.

Samples are named by their rows in the manifest, whose order is that of the step's files: shard
after shard, a group's samples next to each other.

Mini-batches of epoch 0: of each M neighbouring groups (M: the number of mini-batches), every
mini-batch gets one, chosen by a hash of (seed, step). So every mini-batch draws evenly from the
step's files, and none depends on the parallel layout. Within a mini-batch the rows stay in order
and are cut into neighbouring ranges, one per data-parallel rank: a rank's samples of the whole step
lie together in the files, so it fetches few other row groups. Packed micro-batches are about
tokens, so the ranges have nearly equal tokens; padded ones about samples.

A sample stays on its data-parallel rank for the whole step, so that old log-probs and R2 routes are
where they are needed. In later epochs each rank reorders its own samples by a hash that includes
the epoch, as verl does.

Letters: N samples of a step, D data-parallel ranks, M mini-batches.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from operators.training.batches.balance import bins, cut_evenly
from operators.training.batches.hashing import hashes, salt
from operators.training.batches.zigzag import sequence_multiple

LENGTH_MULTIPLE = 8
"""Padded lengths are multiples of this, so that shapes repeat and suit tensor cores."""

Rows = npt.NDArray[np.int64]
"""Rows of the manifest."""


@dataclass(frozen=True)
class LayoutRules:
    """The settings that decide the layout."""

    seed: int
    mini_batch_groups: int
    """Maximum prompts per optimizer step, over all ranks; a prompt's samples stay together."""
    micro_batch_samples: int | None
    """Largest number of samples per micro-batch on one data-parallel rank; None: any number."""
    epochs: int
    data_parallel: int
    micro_batch_multiple: int = 1
    """Virtual pipeline stages need a multiple of PP micro-batches."""
    sequence_slices: int = 1
    """Sequence parallelism cuts each row into this many equal slices."""
    context_parallel: int = 1
    """Ranks that hold a part of each sequence; rows are those of all of them together."""
    packed: bool = False
    """Samples lie back to back in one row; False: each in a row of its own, padded."""
    max_tokens: int | None = None
    """Largest number of positions of a packed micro-batch, padding aside; None: any number."""
    same_shape: Literal["no", "ranks", "all"] = "no"
    """Which micro-batches of a mini-batch must have one shape: each rank's i-th (expert parallelism
    gathers over ranks that hold different samples), or all (pipeline stages exchange tensors)."""


@dataclass(frozen=True)
class MicroRows:
    """The samples of a micro-batch and where they lie in the flattened [B, N]."""

    rows: tuple[int, ...]
    """Rows of the manifest."""
    starts: tuple[int, ...]
    """By sample: the index of its first position."""
    shape: tuple[int, int]
    """B and N."""
    packed: bool
    """Whether samples share a row."""


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer step, by data-parallel rank and micro-batch.

    Every rank has the same number of micro-batches.
    """

    epoch: int
    shares: tuple[tuple[MicroRows, ...], ...]
    """By data-parallel rank."""

    def rows(self, dp_rank: int) -> Rows:
        """The samples of one data-parallel rank, in the order of their use."""
        share = self.shares[dp_rank]
        return np.array([row for micro_batch in share for row in micro_batch.rows], np.int64)


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
    def rank_N(self) -> npt.NDArray[np.int64]:
        """The data-parallel rank of each sample."""
        rows_D = [self.rows(rank) for rank in range(self.rules.data_parallel)]
        found_N = np.empty(sum(len(rows) for rows in rows_D), np.int64)
        for rank, rows in enumerate(rows_D):
            found_N[rows] = rank
        return found_N

    @property
    def sha256(self) -> str:
        """Digest of the whole layout."""
        digest = hashlib.sha256(repr(self.rules).encode())
        digest.update(repr(self.mini_batches).encode())
        return digest.hexdigest()


def make_layout(
    step: int,
    groups_N: npt.NDArray[np.int64],
    lengths_N: npt.NDArray[np.int64],
    rules: LayoutRules,
    rank_N: npt.NDArray[np.int64] | None = None,
) -> Layout:
    """The layout of a step, from columns of its manifest.

    `groups_N` holds a number per sample, equal for neighbours of the same group; `lengths_N` holds
    numbers of positions (S - 1); `rank_N` says on which data-parallel rank a sample is already;
    None: each mini-batch is cut evenly. Raises ValueError without samples, and for a sample that is
    longer than a micro-batch may be.
    """
    if not len(groups_N):
        raise ValueError(f"step {step}: the manifest has no samples, there is nothing to train on")
    if rules.max_tokens is not None and (longest := int(lengths_N.max())) > rules.max_tokens:
        raise ValueError(
            f"step {step}: a sample of {longest} positions, at most {rules.max_tokens}"
        )
    cuts = _mini_batch_rows(step, groups_N, rules)
    if rank_N is None:
        shares = [_shares(rows, lengths_N, rules) for rows in cuts]
    else:
        ranks = range(rules.data_parallel)
        shares = [[rows[rank_N[rows] == rank] for rank in ranks] for rows in cuts]
    mini_batches = [_mini_batch(0, share, lengths_N, rules) for share in shares]
    for epoch in range(1, rules.epochs):
        of_epoch = salt(rules.seed, step, epoch)
        of_ranks = zip(*shares, strict=True)
        again = [_reshuffled(list(of_rank), of_epoch) for of_rank in of_ranks]
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
    order = np.lexsort((hashes(numbers, salt(rules.seed, step, 0)), numbers // batches))
    batch_of_group = np.empty(count, np.int64)
    batch_of_group[order] = numbers % batches
    batch_N = batch_of_group[group_N]
    sizes = np.bincount(batch_N, minlength=batches)
    return np.split(np.argsort(batch_N, kind="stable"), np.cumsum(sizes)[:-1])


def _reshuffled(rows: list[Rows], of_epoch: int) -> list[Rows]:
    """One rank's samples in a new order, cut into shares of the same sizes as before."""
    together = np.concatenate(rows)
    order = np.argsort(hashes(together, of_epoch), kind="stable")
    return np.split(together[order], np.cumsum([len(share) for share in rows])[:-1])


def _shares(rows: Rows, lengths_N: npt.NDArray[np.int64], rules: LayoutRules) -> list[Rows]:
    """Cut a mini-batch's rows into neighbouring ranges, one per data-parallel rank."""
    if not rules.packed:
        return np.array_split(rows, rules.data_parallel)
    return [rows[part] for part in cut_evenly(lengths_N[rows], rules.data_parallel)]


def _mini_batch(
    epoch: int,
    share: Sequence[Rows],
    lengths_N: npt.NDArray[np.int64],
    rules: LayoutRules,
) -> MiniBatch:
    cut = _packs if rules.packed else _padded
    micro_batches = cut(share, lengths_N, rules)
    widths = [[_width(lengths_N[rows], rules) for rows in of_rank] for of_rank in micro_batches]
    widest = [max(of_index) for of_index in zip(*widths, strict=True)]
    if rules.same_shape == "all":
        widest = [max(widest)] * len(widest)
    if rules.same_shape != "no":
        widths = [widest] * len(widths)
    most = max(len(rows) for of_rank in micro_batches for rows in of_rank)
    return MiniBatch(
        epoch,
        tuple(
            tuple(
                _placed(rows, lengths_N[rows], width, rules, most)
                for rows, width in zip(*of_rank, strict=True)
            )
            for of_rank in zip(micro_batches, widths, strict=True)
        ),
    )


def _packs(
    share: Sequence[Rows], lengths_N: npt.NDArray[np.int64], rules: LayoutRules
) -> list[list[Rows]]:
    """Cut each rank's rows into equally many packs within the limits of samples and tokens."""
    most, budget = rules.micro_batch_samples, rules.max_tokens
    fewest = 1
    for rows in share:
        if most is not None:
            fewest = max(fewest, -(-len(rows) // most))
        if budget is not None:
            fewest = max(fewest, -(-int(lengths_N[rows].sum()) // budget))
    count = _up(fewest, rules.micro_batch_multiple)
    while True:  # ends at the latest when each sample has a pack of its own
        packs = [[rows[i] for i in bins(lengths_N[rows], count, most)] for rows in share]
        if budget is None or all(lengths_N[r].sum() <= budget for p in packs for r in p):
            return packs
        count += rules.micro_batch_multiple


def _padded(
    share: Sequence[Rows], lengths_N: npt.NDArray[np.int64], rules: LayoutRules
) -> list[list[Rows]]:
    """Cut each rank's rows, longest first, so that neighbours in length share a micro-batch."""
    most = max(len(rows) for rows in share)
    count = _up(-(-most // (rules.micro_batch_samples or most)), rules.micro_batch_multiple)
    size = -(-most // count)  # as even as possible, for the fewest fillers
    by_length = [rows[np.argsort(-lengths_N[rows], kind="stable")] for rows in share]
    return [[rows[size * i : size * (i + 1)] for i in range(count)] for rows in by_length]


def _width(lengths: npt.NDArray[np.int64], rules: LayoutRules) -> int:
    needed = _taken(lengths, rules).sum() if rules.packed else lengths.max(initial=0)
    return _up(int(needed), LENGTH_MULTIPLE * rules.sequence_slices * rules.context_parallel)


def _taken(lengths: npt.NDArray[np.int64], rules: LayoutRules) -> npt.NDArray[np.int64]:
    """Positions that samples take in a packed row, each with its own padding."""
    multiple = sequence_multiple(rules.context_parallel, rules.sequence_slices)
    return -(-lengths // multiple) * multiple


def _placed(
    rows: Rows, lengths: npt.NDArray[np.int64], width: int, rules: LayoutRules, most: int
) -> MicroRows:
    """Place samples in a row, or each in one of its own; `most` is the mini-batch's most rows."""
    if rules.packed:
        taken = _taken(lengths, rules)
        starts, batch = np.cumsum(taken) - taken, 1
    else:
        starts = width * np.arange(len(rows))
        batch = most if rules.same_shape != "no" else max(1, len(rows))
    return MicroRows(tuple(rows.tolist()), tuple(starts.tolist()), (batch, width), rules.packed)


def _up(number: int, multiple: int) -> int:
    return max(-(-number // multiple), 1) * multiple
