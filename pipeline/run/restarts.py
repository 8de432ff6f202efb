"""The policy versions from which a run's training can restart."""

from pipeline.run import keys
from pipeline.store.base import Store

KEPT = 2
"""Checkpoints that stay, as the newest may turn out to be damaged: the trainer removes older ones,
and `retrace traces prune` leaves the samples that a restart from the oldest of these needs."""


def restarts(store: Store) -> list[int]:
    """Versions of the checkpoints at which a restart may begin, ascending.

    Metrics are the last commit of a step. A checkpoint of a step without metrics does not count:
    that step must be trained again from the checkpoint before, or its metrics would never be
    written.
    """
    found = (keys.number_of(info.key) for info in store.list(keys.checkpoints()))
    return sorted(
        version
        for version in found
        if version is not None and store.size(keys.metrics(version - 1)) is not None
    )
