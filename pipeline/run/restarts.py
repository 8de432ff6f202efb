"""How far a run has come, and the policy versions from which its training can restart."""

from pipeline.run import keys
from pipeline.store.base import Store

KEPT = 2
"""Checkpoints that stay, as the newest may turn out to be damaged: the trainer removes older ones,
and `retrace traces prune` leaves the samples that a restart from the oldest of these needs."""


def finished_steps(store: Store) -> int:
    """How many steps are finished, from step 0 on. One listing; no object is read."""
    finished = 0
    for info in store.list(keys.steps()):  # in the order of steps, as the list is in key order
        if info.key == keys.metrics(finished):
            finished += 1
    return finished


def repeated_text(store: Store) -> str | None:
    """Which finished steps are trained again when training starts anew, for people; None: none.

    They are those since the last checkpoint, as a trainer's state is in its checkpoints alone.
    Example: no checkpoint yet: training steps 0 to 2 again (3 steps) before step 3.
    """
    first, finished = max(restarts(store), default=0), finished_steps(store)
    if first >= finished:
        return None
    since = f"the last checkpoint is of policy {first}" if first else "no checkpoint yet"
    which, count = f"step {first}", ""
    if finished > first + 1:
        which, count = f"steps {first} to {finished - 1}", f" ({finished - first} steps)"
    return f"{since}: training {which} again{count} before step {finished}"


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
