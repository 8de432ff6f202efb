"""Counts of replayed rows, for each layer and each sample."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from operators.training.batches.micro_batch import NATIVE, PADDING, REPLAYED, MicroBatch
from operators.training.errors import ReplayError
from operators.training.replay.hooks import Replayer


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

SampleCounts = dict[str, npt.NDArray[np.int64]]
"""Row counts, int64 [2, 2] for each sample id, summed over layers. The first index selects the
prompt or the response, the second index the replayed or the agreeing rows."""


def counts_of(replayers: Mapping[int, Replayer]) -> Counts:
    """Return the counts of a pass's replayers, keyed by layer."""
    return {
        layer: LayerCounts(
            replayed=int(replayer.rows[REPLAYED]),
            native=int(replayer.rows[NATIVE]),
            padding=int(replayer.rows[PADDING]),
            agreeing=replayer.agreeing,
        )
        for layer, replayer in replayers.items()
    }


def sample_counts_of(
    replayers: Mapping[int, Replayer], batches: Sequence[MicroBatch]
) -> SampleCounts:
    """Return the counts of a pass's replayers, keyed by sample id.

    Args:
        replayers: Replayers, keyed by layer; empty if nothing was replayed.
        batches: The pass's micro-batches.
    """
    found: SampleCounts = {}
    for i, batch in enumerate(batches if replayers else ()):
        parts_R = batch.rows.parts_R
        replayed_R = batch.rows.kinds_R == REPLAYED
        agreeing_Rs = [replayer.agreeing_R[i].cpu().numpy() for replayer in replayers.values()]
        size = 2 * len(batch.places)
        replayed = len(replayers) * np.bincount(parts_R[replayed_R], minlength=size)
        agreeing = sum(np.bincount(parts_R[rows_R], minlength=size) for rows_R in agreeing_Rs)
        parts = np.stack([replayed, agreeing], axis=1).reshape(-1, 2, 2)
        found |= {place.id: of_sample for place, of_sample in zip(batch.places, parts, strict=True)}
    return found


def added(many: Iterable[Counts]) -> Counts:
    """Add up the counts of each layer, over mini-batches or over ranks that see different rows."""
    total: Counts = {}
    for counts in many:
        for layer, count in counts.items():
            total[layer] = total.get(layer, LayerCounts()) + count
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
