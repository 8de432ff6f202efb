"""The recorded sets of a micro-batch on the device.

    laid out (CPU) ─► ReplayedRows: one upload per micro-batch ─► Replayer of each layer: row l
                                                                        │ misfits, on the device
    counts.py  ◄──────────── one copy per pass ◄────────────────────────┘

A GPU never waits for the replay: all copies to the device come from pinned memory, and nothing is
read back before the pass has ended.

Dimensions: L MoE layers of this rank, R rows that its routers see in a micro-batch, K experts per
token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from operators.training.batches.micro_batch import REPLAYED
from operators.training.batches.upload import uploaded
from operators.training.errors import ReplayError


class ReplayedRows:
    """A micro-batch's recorded sets on the device, and their comparison with the routers' choices.

    Args:
        kinds_R: REPLAYED, NATIVE or PADDING for each row.
        sets_LRK: Recorded expert ids, ascending within each row.
        layers: The layers, by their index in the model.
        experts: Number of experts in a layer.
        device: Where the routers compute.

    Raises:
        ReplayError: An id of a REPLAYED row is too large, or the row's ids are not strictly
            ascending.
    """

    def __init__(
        self,
        kinds_R: npt.NDArray[np.uint8],
        sets_LRK: npt.NDArray[Any],
        layers: Sequence[int],
        experts: int,
        device: torch.device,
    ) -> None:
        replayed_R = kinds_R == REPLAYED
        _check_sets(layers, sets_LRK, replayed_R, experts)
        self.counts = np.bincount(kinds_R, minlength=3)
        """Number of rows by kind: REPLAYED, NATIVE, PADDING."""
        self.replayed_R1 = uploaded(replayed_R, device)[:, None]
        self.sets_LRK = uploaded(sets_LRK, device)
        self.misfits_LR = torch.zeros(sets_LRK.shape[:2], dtype=torch.uint8, device=device)
        """SAME, DIFFERENT or FOREIGN (hooks.py), written by the replayers; SAME if not REPLAYED."""


def _check_sets(
    layers: Sequence[int],
    sets_LRK: npt.NDArray[Any],
    replayed_R: npt.NDArray[np.bool_],
    experts: int,
) -> None:
    """Check that routers could have chosen the recorded sets, before a kernel uses them."""
    found_LXK = sets_LRK[:, replayed_R]
    for layer, sets_XK in zip(layers, found_LXK, strict=True):
        if sets_XK.size and (largest := int(sets_XK.max())) >= experts:
            raise ReplayError(
                f"layer {layer}: a recorded expert id is {largest}, expected less than {experts}, "
                "the number of experts; the routes belong to another model"
            )
        if not (sets_XK[:, 1:] > sets_XK[:, :-1]).all():
            raise ReplayError(
                f"layer {layer}: a recorded row names an expert twice or is not ascending; check "
                "the trace with `retrace traces verify`"
            )
