"""Counts of replayed rows, for each layer and each sample.

Dimensions: R rows that this rank's routers see in a micro-batch; X parts or blocks of all samples
in a micro-batch. `OfSample` explains the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from operators.training.batches.micro_batch import NATIVE, PADDING, REPLAYED, MicroBatch
from operators.training.errors import ReplayError
from operators.training.replay.hooks import DIFFERENT, FOREIGN, SAME, Replayer
from operators.training.replay.replayed import ReplayedRows

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class LayerCounts:
    """Counts of rows that a layer's router saw. Example: LayerCounts(900, 20, 104, 871)."""

    replayed: int = 0
    native: int = 0
    """Rows without a valid recording, routed by the router's own choice."""
    padding: int = 0
    agreeing: int = 0
    """Replayed rows for which the router itself would have chosen the recorded experts."""

    def __add__(self, other: "LayerCounts") -> "LayerCounts":
        return LayerCounts(
            self.replayed + other.replayed,
            self.native + other.native,
            self.padding + other.padding,
            self.agreeing + other.agreeing,
        )


Counts = dict[int, LayerCounts]
"""Counts, keyed by the layer's index in the model."""

BLOCK = 8
"""Number of consecutive positions of a sample that are counted together."""


@dataclass(frozen=True)
class OfSample:
    """Counts of a sample's recorded sets, for the rows and layers of one rank.

    Dimensions: L layers of the rank; P parts (prompt, response); B blocks of BLOCK positions; C
    counts: replayed sets, those that differ from the router's choice, and those that are FOREIGN.
    """

    sets_LPC: npt.NDArray[np.int32]
    block_BC: npt.NDArray[np.int32]
    """Sums over the layers."""


SampleCounts = dict[str, OfSample]
"""Counts, keyed by sample id."""


@dataclass(frozen=True)
class Replay:
    """The replay of a pass; empty if the pass routes natively."""

    rows: Sequence[ReplayedRows] = ()
    """One item per micro-batch, created on first access."""
    replayers: Mapping[int, Replayer] = field(default_factory=dict)
    """A replayer for each MoE layer of this rank, keyed by the layer's index in the model."""

    @cached_property
    def misfits_LR(self) -> list[npt.NDArray[np.uint8]]:
        """How each recorded set compares with the router's choice, for each micro-batch.

        Read this after the pass: the first access copies the device's results in one go.
        """
        all_LX = torch.cat([rows.misfits_LR for rows in self.rows], dim=1).cpu().numpy()
        ends = np.cumsum([rows.misfits_LR.shape[1] for rows in self.rows])[:-1]
        return np.split(all_LX, ends, axis=1)


def counts_of(replay: Replay) -> Counts:
    """Return the counts of a finished pass, keyed by layer; {} if it replayed nothing."""
    if not replay.replayers:
        return {}
    differing_L = sum((misfits_LR != SAME).sum(axis=1) for misfits_LR in replay.misfits_LR)
    return {
        layer: LayerCounts(
            replayed=int(replayer.rows[REPLAYED]),
            native=int(replayer.rows[NATIVE]),
            padding=int(replayer.rows[PADDING]),
            agreeing=int(replayer.rows[REPLAYED] - differing),
        )
        for (layer, replayer), differing in zip(replay.replayers.items(), differing_L, strict=True)
    }


def sample_counts_of(replay: Replay, batches: Sequence[MicroBatch]) -> SampleCounts:
    """Return the counts of a finished pass, keyed by sample id; {} if it replayed nothing.

    Args:
        replay: The pass's replay.
        batches: The pass's micro-batches.
    """
    if not replay.replayers:
        return {}
    found: SampleCounts = {}
    for batch, misfits_LR in zip(batches, replay.misfits_LR, strict=True):
        replayed_R = batch.rows.kinds_R == REPLAYED
        parts_R = batch.rows.parts_R[replayed_R]
        blocks = [-(-place.positions // BLOCK) for place in batch.places]
        firsts = np.cumsum([0, *blocks])
        block_R = firsts[parts_R // 2] + batch.rows.positions_R[replayed_R] // BLOCK
        sets_CLX, block_CX = [], []
        for least in (SAME, DIFFERENT, FOREIGN):
            counted_LR = misfits_LR[:, replayed_R] >= least
            sets_CLX.append([_counts(parts_R, of_R, 2 * len(blocks)) for of_R in counted_LR])
            block_CX.append(_counts(block_R, counted_LR.sum(axis=0), firsts[-1]))
        sets_LXC, block_XC = np.transpose(sets_CLX, (1, 2, 0)), np.transpose(block_CX)
        for n, place in enumerate(batch.places):
            parts, own = slice(2 * n, 2 * n + 2), slice(firsts[n], firsts[n + 1])
            found[place.id] = OfSample(sets_LXC[:, parts], block_XC[own])
    return found


def _counts(codes_R: npt.NDArray[Any], weights_R: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Add up the weights of the rows with each code, int32 [size]."""
    return np.bincount(codes_R, weights_R, size).astype(np.int32)


def added(many: Iterable[Mapping[K, V]]) -> dict[K, V]:
    """Add up the values of each key, in order, such as counts of each layer over mini-batches.

    A key that some of the mappings lack counts as 0 there.
    """
    total: dict[K, Any] = {}
    for one in many:
        for key, value in one.items():
            total[key] = total[key] + value if key in total else value
    return total


def check_passes(
    step: int, passes: Mapping[str, Counts], layers: Iterable[int], valid: int, rows: int
) -> None:
    """Check that every MoE layer replayed exactly the valid rows of the step, in each pass.

    Args:
        step: Number of the step.
        passes: Counts over all ranks, keyed by the pass's name.
        layers: The MoE layers to check, by their index in the model.
        valid: Number of rows in the sealed step that have a valid recording.
        rows: Total number of rows in the sealed step.

    Raises:
        ReplayError: A count differs from the expected number, no row is valid, or no pass replayed
            anything.
    """
    if valid == 0:
        raise ReplayError(
            f"step {step}: none of the {rows} rows has a valid recording, so replay would have no "
            "effect. See `retrace traces stats`, or start a new run, under another "
            "trainer.experiment_name, with actor_rollout_ref.actor.router_replay.mode=disabled"
        )
    if not passes:
        raise ReplayError(
            f"step {step}: no pass replayed routes, although {valid} rows have a valid recording; "
            "the trainer did not read them"
        )
    for name, counts in passes.items():
        for layer in layers:
            found = counts.get(layer, LayerCounts())
            if (found.replayed, found.native) != (valid, rows - valid):
                raise ReplayError(
                    f"step {step}, {name}, layer {layer}: {found.replayed} rows were replayed and "
                    f"{found.native} routed natively; expected {valid} and {rows - valid}, "
                    "according to the step's recordings"
                )
