"""The layout, which assigns samples to ranks and micro-batches.

The layout depends only on the manifest and the config.

A sample is identified by its row in the manifest. The rows are in the order of the step's files:
shard after shard, with the samples of a group next to each other.

In epoch 0, the step's groups are taken in order, M at a time. Each of these M groups goes to a
different mini-batch. A hash of (seed, step) determines which group goes to which mini-batch. Each
mini-batch therefore draws evenly from the step's files and does not depend on the parallel sizes.
Within a mini-batch the rows stay in order and are cut into contiguous ranges, one per data-parallel
rank. A rank's samples are thus close together in the files, and few of the row groups that the rank
fetches also hold other ranks' samples. The ranges contain nearly equal numbers of tokens if
micro-batches are packed, and nearly equal numbers of samples if they are padded.

A sample stays on its data-parallel rank for the entire step, so that its old log-probs and R2
routes are on the rank that needs them. In later epochs each rank reorders its own samples, as in
verl. The order is determined by a hash that includes the epoch.

Dimensions: N samples in a step, D data-parallel ranks, M mini-batches.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from operators.training.batches.balance import bins, cut_evenly
from operators.training.batches.hashing import hashes, salt
from operators.zigzag import sequence_multiple

LENGTH_MULTIPLE = 8
"""Padded lengths are multiples of this number, so that shapes repeat and suit tensor cores."""

Rows = npt.NDArray[np.int64]
"""Rows of the manifest."""


@dataclass(frozen=True)
class LayoutRules:
    """The settings that determine the layout."""

    seed: int
    mini_batch_groups: int
    """Maximum number of groups per optimizer step, over all ranks; a group is never split."""
    micro_batch_samples: int | None
    """Maximum number of samples per micro-batch on a data-parallel rank; None for no limit."""
    epochs: int
    data_parallel: int
    micro_batch_multiple: int = 1
    """The number of micro-batches is a multiple of this number: PP with virtual stages, else 1."""
    sequence_slices: int = 1
    """Number of equal slices into which sequence parallelism cuts each row."""
    context_parallel: int = 1
    """Number of ranks that share each sequence; rows in the layout span all of these ranks."""
    packed: bool = False
    """Whether samples are packed into one row; otherwise each sample has a separate, padded row."""
    max_tokens: int | None = None
    """Maximum number of positions in a packed micro-batch, excluding padding; None for no limit."""
    same_shape: Literal["no", "ranks", "all"] = "no"
    """The micro-batches of a mini-batch that must have the same shape. "ranks": the i-th
    micro-batches of all ranks, because expert parallelism gathers across ranks with different
    samples. "all": all micro-batches, because pipeline stages exchange tensors of one shape."""


@dataclass(frozen=True)
class MicroRows:
    """The samples of a micro-batch and their places in the flattened array [B, N]."""

    rows: tuple[int, ...]
    """Rows of the manifest."""
    starts: tuple[int, ...]
    """Index of each sample's first position."""
    shape: tuple[int, int]
    """The number of rows, B, and the number of positions per row, N."""
    packed: bool
    """Whether samples share a row."""


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer step, divided into each data-parallel rank's micro-batches.

    Every rank has the same number of micro-batches.
    """

    epoch: int
    shares: tuple[tuple[MicroRows, ...], ...]
    """The micro-batches of each data-parallel rank."""

    def rows(self, dp_rank: int) -> Rows:
        """Return the samples of one data-parallel rank, in the order in which they are used."""
        share = self.shares[dp_rank]
        return np.array([row for micro_batch in share for row in micro_batch.rows], np.int64)


@dataclass(frozen=True)
class Layout:
    """The mini-batches of a step, in training order."""

    rules: LayoutRules
    mini_batches: tuple[MiniBatch, ...]

    def epoch(self, epoch: int) -> list[MiniBatch]:
        """Return the mini-batches of one epoch."""
        return [batch for batch in self.mini_batches if batch.epoch == epoch]

    def rows(self, dp_rank: int) -> Rows:
        """Return a data-parallel rank's samples in this step, in the order of epoch 0."""
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
        """Digest of the rules and all mini-batches."""
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
    """Lay out a step from columns of its manifest.

    Args:
        step: Number of the step.
        groups_N: For each sample, the number of its group; a group's samples are adjacent.
        lengths_N: Number of positions in each sample (S - 1).
        rules: The settings that determine the layout.
        rank_N: For each sample, the data-parallel rank that already has it; None cuts each
            mini-batch evenly.

    Raises:
        ValueError: The manifest has no samples, or a sample is too long for a micro-batch.
    """
    if not len(groups_N):
        raise ValueError(f"step {step}: the manifest has no samples to train on")
    if rules.max_tokens is not None and (longest := int(lengths_N.max())) > rules.max_tokens:
        raise ValueError(
            f"step {step}: a sample has {longest} positions; a micro-batch holds at most "
            f"{rules.max_tokens}"
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
    """Return the rows of each mini-batch in epoch 0, ascending."""
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
    """Reorder one rank's samples, and cut them into mini-batches of the same sizes as before."""
    together = np.concatenate(rows)
    order = np.argsort(hashes(together, of_epoch), kind="stable")
    return np.split(together[order], np.cumsum([len(share) for share in rows])[:-1])


def _shares(rows: Rows, lengths_N: npt.NDArray[np.int64], rules: LayoutRules) -> list[Rows]:
    """Cut a mini-batch's rows into contiguous ranges, one per data-parallel rank."""
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
    """Cut every rank's rows into the same number of packs, within the sample and token limits."""
    most, budget = rules.micro_batch_samples, rules.max_tokens
    fewest = 1
    for rows in share:
        if most is not None:
            fewest = max(fewest, -(-len(rows) // most))
        if budget is not None:
            fewest = max(fewest, -(-int(lengths_N[rows].sum()) // budget))
    count = _up(fewest, rules.micro_batch_multiple)
    while True:  # ends with one sample per pack at the latest
        packs = [[rows[i] for i in bins(lengths_N[rows], count, most)] for rows in share]
        if budget is None or all(lengths_N[r].sum() <= budget for p in packs for r in p):
            return packs
        count += rules.micro_batch_multiple


def _padded(
    share: Sequence[Rows], lengths_N: npt.NDArray[np.int64], rules: LayoutRules
) -> list[list[Rows]]:
    """Cut each rank's rows, longest first, into micro-batches of samples with similar lengths."""
    most = max(len(rows) for rows in share)
    count = _up(-(-most // (rules.micro_batch_samples or most)), rules.micro_batch_multiple)
    size = -(-most // count)  # as even as possible, to minimise padding
    by_length = [rows[np.argsort(-lengths_N[rows], kind="stable")] for rows in share]
    return [[rows[size * i : size * (i + 1)] for i in range(count)] for rows in by_length]


def _width(lengths: npt.NDArray[np.int64], rules: LayoutRules) -> int:
    needed = _taken(lengths, rules).sum() if rules.packed else lengths.max(initial=0)
    return _up(int(needed), LENGTH_MULTIPLE * rules.sequence_slices * rules.context_parallel)


def _taken(lengths: npt.NDArray[np.int64], rules: LayoutRules) -> npt.NDArray[np.int64]:
    """Return how many positions each sample takes in a packed row, including its own padding."""
    multiple = sequence_multiple(rules.context_parallel, rules.sequence_slices)
    return -(-lengths // multiple) * multiple


def _placed(
    rows: Rows, lengths: npt.NDArray[np.int64], width: int, rules: LayoutRules, most: int
) -> MicroRows:
    """Place all samples in one row, or each sample in a separate row.

    `most` is the largest number of samples in any micro-batch of the mini-batch.
    """
    if rules.packed:
        taken = _taken(lengths, rules)
        starts, batch = np.cumsum(taken) - taken, 1
    else:
        starts = width * np.arange(len(rows))
        batch = most if rules.same_shape != "no" else max(1, len(rows))
    return MicroRows(tuple(rows.tolist()), tuple(starts.tolist()), (batch, width), rules.packed)


def _up(number: int, multiple: int) -> int:
    return max(-(-number // multiple), 1) * multiple
