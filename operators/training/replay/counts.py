"""Counts of replay, per layer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from operators.training.batches.micro_batch import NATIVE, PADDING, REPLAYED, MicroBatch
from operators.training.errors import ReplayError
from operators.training.replay.hooks import Replayer


@dataclass(frozen=True)
class LayerCounts:
    """Numbers of rows that a layer's router saw. Example: LayerCounts(900, 20, 104, 871)."""

    replayed: int = 0
    native: int = 0
    """Rows with the router's own choice, because the recording is not valid there."""
    padding: int = 0
    agreeing: int = 0
    """Replayed rows where the router's own choice is the recorded one."""

    def __add__(self, other: "LayerCounts") -> "LayerCounts":
        return LayerCounts(
            self.replayed + other.replayed,
            self.native + other.native,
            self.padding + other.padding,
            self.agreeing + other.agreeing,
        )


Counts = dict[int, LayerCounts]
"""Counts by model index of the layer."""

SampleCounts = dict[str, npt.NDArray[np.int64]]
"""By sample id: replayed and agreeing rows, added over layers, of its prompt and its response."""


def counts_of(replayers: Mapping[int, Replayer]) -> Counts:
    """The counts of a pass's replayers."""
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
    """The counts of a pass's replayers by sample; `batches` are the pass's micro-batches."""
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
    """The sum by layer: over mini-batches, or over ranks that see different rows."""
    total: Counts = {}
    for counts in many:
        for layer, count in counts.items():
            total[layer] = total.get(layer, LayerCounts()) + count
    return total


def check_passes(
    step: int, passes: Mapping[str, Counts], layers: Iterable[int], valid: int, rows: int
) -> None:
    """Check that in each pass every MoE layer replayed exactly the valid rows of the step.

    `passes` holds the counts over all ranks, by name of the pass. `valid` and `rows` are those of
    the sealed step. Raises ReplayError.
    """
    if valid == 0:
        raise ReplayError(
            f"step {step}: none of the {rows} rows has a valid recording, so replay would do "
            "nothing; look at `retrace traces stats`, or start a new run (another "
            "trainer.experiment_name) with actor_rollout_ref.actor.router_replay.mode=disabled"
        )
    if not passes:
        raise ReplayError(
            f"step {step}: no pass had routes to replay, although {valid} rows have a valid "
            "recording: the trainer did not read them"
        )
    for name, counts in passes.items():
        for layer in layers:
            found = counts.get(layer, LayerCounts())
            if (found.replayed, found.native) != (valid, rows - valid):
                raise ReplayError(
                    f"step {step}, {name}, layer {layer}: {found.replayed} rows were replayed and "
                    f"{found.native} routed natively; the step's recordings ask for {valid} and "
                    f"{rows - valid}"
                )
