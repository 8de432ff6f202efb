"""From which policy version a run's training may go on."""

from pipeline.store import keys
from pipeline.store.base import Store


def restarts(store: Store) -> list[int]:
    """Versions of the checkpoints that a restart may begin at, ascending.

    Metrics are the last commit of a step. A checkpoint whose step has none does not count: the step
    that made it must be trained again from the one before, or its metrics would never be written.
    """
    found = (keys.number_of(info.key) for info in store.list(keys.checkpoints()))
    return sorted(
        version
        for version in found
        if version is not None and store.size(keys.metrics(version - 1)) is not None
    )
