"""Recorded sets: steps of a run that other runs can replay.

A recorded set is a store with the same objects as the run's own folder: manifests, samples, routes,
plans. Therefore any run can be replayed, too. A run that replays a step copies its data files to
steps/N/replay/ and seals the step with the copies, so it remains complete if the set is deleted.
"""

from pipeline.recorded.record import check_recorded, is_recorded, write_recorded_set
from pipeline.recorded.replay import (
    Expected,
    check_replay,
    expected_of,
    names_weights,
    seal_replay,
)

__all__ = [
    "Expected",
    "check_recorded",
    "check_replay",
    "expected_of",
    "is_recorded",
    "names_weights",
    "seal_replay",
    "write_recorded_set",
]
