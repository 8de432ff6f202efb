"""Copying sealed steps to a recorded set."""

from pipeline.run import keys
from pipeline.run.commit import MOST_BYTES, CorruptObjectError, DataFile, put_bytes, read_data
from pipeline.run.plan import find_step_plans
from pipeline.store import ObjectExistsError, ObjectMissingError, Store
from pipeline.traces.format.manifest import open_manifest, refuse_pruned
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.trainer import find_trainer_routes


def write_recorded_set(run: Store, target: Store, step: int) -> None:
    """Copy a sealed step with all its objects to a recorded set, and its manifest and plans last.

    If the set already contains the step, only the objects that it lacks are copied.

    Args:
        run: Store of the run.
        target: Store of the recorded set.
        step: The step to copy.

    Raises:
        ObjectMissingError: The set lacks an object that the run does not have.
        CorruptObjectError: An object of the set or of the run is damaged.
        TraceError: The step has no routes, the set already contains a different step with this
            number, or the run's step was pruned before it was copied.
    """
    if target.size(keys.manifest(step)) is None:
        refuse_pruned(run, step)
    files, commits = _objects(run, step)
    found = _sizes(target, step)
    for file in files:
        if not _is_there(target, file, found):
            put_bytes(target, file.key, read_data(run, file))
    for key in commits:
        _put_commit(target, key, run.read(key, MOST_BYTES))


def is_recorded(run: Store, target: Store, step: int) -> bool:
    """Return whether a set has all objects of a run's step, by name.

    Args:
        run: The run's store.
        target: The recorded set.
        step: The step.

    Raises:
        CorruptObjectError, TraceError: The run's manifest is damaged.
    """
    files, commits = _objects(run, step)
    return {*(file.key for file in files), *commits} <= _sizes(target, step).keys()


def check_recorded(run: Store, target: Store, step: int) -> None:
    """Raise an error unless a recorded set contains a run's sealed step with all its objects.

    Args:
        run: The run's store.
        target: The recorded set.
        step: The step.

    Raises:
        ObjectMissingError: The set lacks an object.
        CorruptObjectError: A file of the set has another size than its commit records.
        TraceError: The set's step was pruned, or is a different step.
    """
    refuse_pruned(target, step)
    files, commits = _objects(run, step)
    found = _sizes(target, step)
    for key in commits:
        if key not in found:
            raise _missing(target, key)
        _check_same(target, key, run.read(key, MOST_BYTES))
    for file in files:
        if not _is_there(target, file, found):
            raise _missing(target, file.key)


def _objects(run: Store, step: int) -> tuple[list[DataFile], list[str]]:
    """Return a step's data files, and the keys of its commits.

    The plans follow the manifest, so a plan without a manifest shows that the manifest is lost
    (`upkeep.lost_commits`). plan.json is last, so a set that has it has all plans. Raises
    TraceError if the step has no routes.
    """
    sealed = open_manifest(run, step)
    trainer = find_trainer_routes(run, sealed.head)
    if sealed.head.geometry is None and trainer is None:
        raise TraceError(
            f"step {step} of {run.uri}: no routes were recorded, so it cannot be in a recorded set"
        )
    files = [*sealed.head.files, *(trainer.files if trainer else ()), sealed.file]
    shards = [keys.rollout(step, shard) for shard in range(sealed.shards)]
    training = [keys.trainer_routes(step)] if trainer else []
    plans = [plan.key for plan in find_step_plans(run, step)]  # they contain the sampling settings
    commits = [*shards, *training, keys.manifest(step), *reversed(plans)]
    return [file.data for file in files], commits


def _sizes(store: Store, step: int) -> dict[str, int]:
    """Return the sizes of a step's objects, in bytes, keyed by object key."""
    listed = store.list(keys.step_prefix(step))
    return {info.key: info.size for info in listed}


def _is_there(target: Store, file: DataFile, found: dict[str, int]) -> bool:
    """Return whether a set has a file. Raises CorruptObjectError if it has another size."""
    if file.key not in found:
        return False
    if found[file.key] != file.size:
        raise CorruptObjectError(
            f"{file.key} in {target.uri}: {found[file.key]} bytes, but the run's manifest records "
            f"{file.size}; remove the object, and let the run write it"
        )
    return True


def _missing(target: Store, key: str) -> ObjectMissingError:
    return ObjectMissingError(
        f"{key} in {target.uri}: no such object, expected the one that the run has; let the run "
        "write it"
    )


def _put_commit(target: Store, key: str, data: bytes) -> None:
    """Create a commit, unless it already exists with the same content."""
    try:
        target.create(key, data)
    except ObjectExistsError:
        _check_same(target, key, data)


def _check_same(target: Store, key: str, data: bytes) -> None:
    """Raise TraceError unless an object of a recorded set has this content."""
    if target.read(key, MOST_BYTES) != data:
        raise TraceError(
            f"{key} in {target.uri}: exists with different content; choose a different "
            "record_file, or remove the existing objects"
        )
