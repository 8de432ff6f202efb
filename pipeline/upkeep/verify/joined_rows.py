"""The part of `verify` that reads the routes of samples from files that a trainer wrote."""

from collections.abc import Sequence

import numpy as np

from pipeline.store import Store
from pipeline.traces.format.manifest import Manifest
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.parts import Part
from pipeline.traces.read.reader import read_slices
from pipeline.upkeep.problems import Report


def verify_rows(
    store: Store, manifest: Manifest, ids: Sequence[str], key: str, report: Report
) -> None:
    """Read all rows of some samples, which also compares the digests of the samples' parts.

    Args:
        store: The run or recorded set.
        manifest: The manifest, or the manifest joined with a training set.
        ids: The samples. All their rows are in memory at the same time.
        key: The key under which problems with samples are reported.
        report: Receives problems.
    """
    with report.noting(key):
        slices = read_slices(store, manifest, ids)
        for part in slices.parts.values():
            with report.noting(part.key):
                check_unknown_rows(part, slices.geometry.topk)
        for id in ids:
            with report.noting(key, id):
                slices.routes(id)


def check_unknown_rows(part: Part, topk: int) -> None:
    """Raise TraceError unless rows that are not valid contain the experts 0..K-1."""
    invalid = np.flatnonzero(~part.valid_N)
    if not len(invalid):
        return
    sets = part.sets_LNK[:, invalid]
    wrong = np.argwhere((sets != np.arange(topk)).any(axis=2))
    for layer, row in wrong[:1].tolist():
        raise TraceError(
            f"{part.key}: layer {part.layers[layer]}: a row that is not valid contains "
            f"{sets[layer, row].tolist()}, expected 0..{topk - 1}"
        )
