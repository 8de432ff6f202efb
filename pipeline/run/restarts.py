"""The progress of a run, and the policy versions from which its training can restart."""

from collections.abc import Iterable

from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from pipeline.store.base import Store

KEPT = 2
"""Number of checkpoints to keep. One would not be enough, because the newest may be damaged. The
trainer removes older checkpoints, and `retrace traces prune` keeps the samples that a restart from
the oldest kept checkpoint needs."""


def finished_steps(store: Store) -> int:
    """Return how many steps have finished, counted from step 0.

    This function lists the store once, and does not read objects. Raises the same error as
    `count_finished`.
    """
    return count_finished(store, trained_steps(store))


def count_finished(store: Store, trained: Iterable[int]) -> int:
    """Return the number of finished steps, given the steps that have metrics in ascending order.

    Raises CorruptObjectError if a step has no metrics although a later step has them.
    """
    finished = 0
    for step in trained:
        lost = keys.metrics(finished)
        # The metrics may have been written since the store listed their folder.
        if step > finished and store.size(lost) is None:
            raise CorruptObjectError(
                f"{lost} in {store.uri}: no such object, but a later step was trained: "
                f"{keys.metrics(step)}; restore the object"
            )
        finished = step + 1
    return finished


def trained_steps(store: Store) -> list[int]:
    """Return the steps that have metrics, in ascending order."""
    found = [(info.key, keys.folder_number(info.key)) for info in store.list(keys.steps())]
    return [step for key, step in found if step is not None and key == keys.metrics(step)]


def repeated_text(store: Store) -> str | None:
    """Return a note about the finished steps that a restart repeats; None if there are none.

    A restart repeats the steps since the last checkpoint, because only checkpoints contain the
    trainer's state. Example: 'no checkpoint yet: training steps 0 to 2 again (3 steps) before step
    3'.
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
    """Return the versions of the checkpoints from which a restart may begin, in ascending order.

    The metrics are the last commit in a step. A checkpoint is omitted if the step that wrote it
    has no metrics, because training must repeat that step from the previous checkpoint. If training
    resumed after the step instead, the step's metrics would never be written.
    """
    found = (keys.number_of(info.key) for info in store.list(keys.checkpoints()))
    return sorted(
        version
        for version in found
        if version is not None and store.size(keys.metrics(version - 1)) is not None
    )


def attempt_count(store: Store) -> int:
    """Return how many attempts a run has had so far, including attempts whose object is lost."""
    objects = (info.key.replace(".stop.json", ".json") for info in store.list(keys.attempts()))
    numbers = map(keys.attempt_number, objects)
    return max((number + 1 for number in numbers if number is not None), default=0)
