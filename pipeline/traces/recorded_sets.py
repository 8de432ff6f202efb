"""Recorded sets: copies of sealed steps in a separate store. Runs can replay these copies.

The steps of a recorded set have the same layout as a run's steps: manifest, samples and routes. A
run that replays a set copies each step's objects to steps/N/replay/ and seals the step with the
copies. The run therefore remains complete even if the set is deleted.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.run import keys
from pipeline.run.commit import MOST_BYTES, CorruptObjectError, read_data
from pipeline.run.parse import same
from pipeline.run.plan import find_step_plans
from pipeline.store import ObjectExistsError, ObjectMissingError, Store
from pipeline.traces.format.chunks import check_size
from pipeline.traces.format.manifest import (
    Commits,
    FileRef,
    Manifest,
    is_pruned,
    open_file,
    open_manifest,
    read_manifest,
    refs_of,
    refuse_pruned,
)
from pipeline.traces.format.schema import MANIFEST
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.joined import digested, used_routes
from pipeline.traces.read.reader import read_samples
from pipeline.traces.read.training import find_training_set
from pipeline.traces.write.seal import write_manifest

_OTHER_FILE = "choose a different record_file, or remove the existing objects"


def write_recorded_set(run: Store, target: Store, step: int) -> None:
    """Copy a sealed step, with the routes that its training used, to a recorded set.

    If the set already contains the same step, only the files, commits and plans that it lacks are
    copied. The plans are copied last, and plan.json as the very last object.

    Args:
        run: Store of the run.
        target: Store of the recorded set.
        step: The step to copy.

    Raises:
        ObjectMissingError: The set lacks an object that the run does not have.
        CorruptObjectError: An object of the set or of the run is damaged.
        TraceError: The step has no routes, the set already contains a different step with this
            number (see `check_recorded`), or the run's step was pruned before it was copied.
    """
    if target.size(keys.manifest(step)) is None:
        refuse_pruned(run, step)
    manifest = _used(run, step)
    if manifest.geometry is None:
        raise TraceError(
            f"step {step} of {run.uri}: no routes were recorded, so it cannot be in a recorded set"
        )
    seal_copy(run, target, manifest, lambda key: key)
    # Plans contain the sampling parameters. A set that has plan.json has all plans of the step.
    for plan in reversed(find_step_plans(run, step)):
        _put(target, plan.key, run.read(plan.key, MOST_BYTES))


def is_recorded(run: Store, target: Store, step: int) -> bool:
    """Return whether a set has a step with all its objects and with the plans that the run has.

    Objects are only looked up by name. `check_recorded` also compares them.

    Args:
        run: The run's store.
        target: The recorded set.
        step: The step.

    Raises:
        CorruptObjectError: A plan, or the manifest or mark of the set's step, is damaged.
        TraceError: The manifest is malformed.
    """
    found = _sizes(target, step)
    if keys.manifest(step) not in found:
        return False
    wanted = {plan.key for plan in find_step_plans(run, step)}
    if not is_pruned(target, step):
        head = open_manifest(target, step).head
        wanted |= {key for ref in head.files for key in (ref.key, ref.commit)}
    return wanted <= found.keys()


def check_recorded(run: Store, target: Store, step: int) -> None:
    """Raise an error unless a recorded set contains a run's sealed step with its files and plans.

    If all files of the set's step are copies of the run's files, according to their digests, only
    their sizes are checked. Otherwise samples and the digests of their routes are compared.

    Args:
        run: The run's store.
        target: The recorded set.
        step: The step.

    Raises:
        ObjectMissingError: The set lacks the step, or one of its files, commits or plans.
        CorruptObjectError: A file has the wrong size, or a commit or a file is damaged.
        TraceError: The set's step was pruned, or contains other samples, routes or plans.
    """
    refuse_pruned(target, step)
    used = _used(run, step)
    there = _same_step(run, target, used)
    for ref in _incomplete(run, target, used, there):
        raise ObjectMissingError(
            f"{ref.key} in {target.uri}: this object or its commit {ref.commit} does not exist; "
            "let the run write it"
        )
    for plan in find_step_plans(run, step):
        _check_same(target, plan.key, run.read(plan.key, MOST_BYTES))


def _used(run: Store, step: int) -> Manifest:
    """Return a step with the routes that its training used.

    In a pruned step of which the trainer recorded the routes (R2), the rows still refer to the
    engine's routes.
    """
    if not is_pruned(run, step):
        return used_routes(run, step)
    manifest = read_manifest(run, step)
    training = find_training_set(run, manifest)
    if training is None:
        return manifest
    at, field = MANIFEST.get_field_index("routes_digest"), MANIFEST.field("routes_digest")
    return replace(
        manifest,
        geometry=training.geometry,
        provenance=training.provenance,
        files=(*manifest.files, *(ref for part in training.commits for ref in refs_of(part))),
        rows=manifest.rows.set_column(at, field, pa.nulls(len(manifest.rows), field.type)),
    )


def seal_copy(
    source: Store, target: Store, manifest: Manifest, renamed: Callable[[str], str]
) -> None:
    """Copy the objects that a manifest lists, and seal the target's step with the copies.

    If the target's step is already sealed, only the objects that it lacks are copied.

    Args:
        source: Store of the step to copy.
        target: Store of the copy.
        manifest: The source's step, with the routes that its training used.
        renamed: Maps the key of a copied object to its key in the target.

    Raises:
        ObjectMissingError: The target lacks an object that the source does not have.
        CorruptObjectError: An object of the source or the target is damaged.
        TraceError: The target contains a different step with this number.
    """
    step = manifest.step
    if target.size(keys.manifest(step)) is not None:
        there = _same_step(source, target, manifest)
        if not is_pruned(target, step):
            _complete(source, target, manifest, there)
        return
    manifest = digested(source, manifest)
    commits = Commits(source)
    refs = []
    for number, ref in enumerate(manifest.files):
        file, _ = open_file(source, manifest, number, commits)
        _put(target, renamed(ref.key), read_data(source, file.data))
        refs.append(replace(ref, key=renamed(ref.key), commit=renamed(ref.commit)))
    for commit in sorted({ref.commit for ref in manifest.files}):  # after the files they name
        _put(target, renamed(commit), source.read(commit))
    write_manifest(target, replace(manifest, files=tuple(refs), training=False))
    _same_step(source, target, manifest)  # another writer may have sealed the step first


def _complete(source: Store, target: Store, manifest: Manifest, there: Manifest) -> None:
    """Copy the files and commits that the target's sealed step lacks."""
    ours = {ref.sha256: number for number, ref in enumerate(manifest.files)}
    for ref in _incomplete(source, target, manifest, there):
        number = ours.get(ref.sha256)
        if number is None:
            raise ObjectMissingError(
                f"{ref.key} in {target.uri}: this object or its commit {ref.commit} does not "
                f"exist, and {source.uri} has no copy; restore the object"
            )
        file, _ = open_file(source, manifest, number)
        if target.size(ref.key) is None:
            _put(target, ref.key, read_data(source, file.data))
        _put(target, ref.commit, source.read(manifest.files[number].commit))


def _incomplete(source: Store, target: Store, manifest: Manifest, there: Manifest) -> list[FileRef]:
    """Return the files of `there`, the target's step, that do not exist or whose commit does not.

    Raises CorruptObjectError for a file whose size differs from that of the source's file, or, if
    the source has no such file, from the size in its commit. Files are looked up in lists of both
    stores, because a step can have thousands of them.
    """
    found, theirs = _sizes(target, manifest.step), _sizes(source, manifest.step)
    copied = {ref.sha256: ref.key for ref in manifest.files}
    commits = Commits(target)
    incomplete = []
    for number, ref in enumerate(there.files):
        if ref.key not in found or ref.commit not in found:
            incomplete.append(ref)
        elif ref.sha256 not in copied:
            check_size(target, open_file(target, there, number, commits)[0])
        elif theirs.get(copied[ref.sha256], found[ref.key]) != found[ref.key]:
            key = copied[ref.sha256]
            raise CorruptObjectError(
                f"{ref.key} in {target.uri}: {found[ref.key]} bytes, but {key} in {source.uri} has "
                f"{theirs[key]}; restore the damaged one of these objects"
            )
    return incomplete


def _sizes(store: Store, step: int) -> dict[str, int]:
    """Return the sizes of a step's objects, in bytes, keyed by object key."""
    listed = store.list(keys.step_prefix(step))
    return {info.key: info.size for info in listed if not info.problem}


def _same_step(source: Store, target: Store, manifest: Manifest) -> Manifest:
    """Return the target's sealed step. Raises TraceError for other samples or routes.

    `manifest` is the source's step from `_used`. If the target has copies of its files, only the
    rows are compared. Otherwise, the samples and routes are read, unless they were pruned.
    """
    there = read_manifest(target, manifest.step)
    name = f"{keys.manifest(manifest.step)} in {target.uri}"
    found, expected = (
        (one.provenance and one.provenance.kind, one.geometry) for one in (there, manifest)
    )
    if found != expected:
        raise TraceError(
            f"{name}: its routes are of kind {found[0]} for {found[1]}, but those in {source.uri} "
            f"are of kind {expected[0]} for {expected[1]}; {_OTHER_FILE}"
        )
    copies = {ref.sha256 for ref in there.files} <= {ref.sha256 for ref in manifest.files}
    kept = not is_pruned(source, manifest.step)
    if not copies and kept:
        manifest = digested(source, manifest)
    columns = ["id", "token_digest", "reward"]
    if not manifest.rows["routes_digest"].null_count:
        columns.append("routes_digest")
    ours, theirs = (one.rows.select(columns).sort_by("id") for one in (manifest, there))
    if not theirs.equals(ours):
        pairs = zip_longest(theirs.to_pylist(), ours.to_pylist())
        sample = next((one or two)["id"] for one, two in pairs if one != two)
        raise TraceError(
            f"{name}: its samples or routes differ from those in {source.uri}, beginning with "
            f"sample {sample}; {_OTHER_FILE}"
        )
    if not copies and kept and not is_pruned(target, manifest.step):
        _refuse_other_samples(source, target, manifest, there)
    return there


def _refuse_other_samples(
    source: Store, target: Store, manifest: Manifest, there: Manifest
) -> None:
    """Raise TraceError if samples differ in what a manifest's rows do not contain, as log-probs."""
    for ids in manifest.id_batches():
        samples = (read_samples(target, there, ids), read_samples(source, manifest, ids))
        for found, expected in zip(*samples, strict=True):
            fields = [
                name
                for name, value in vars(found).items()
                if not _same(value, getattr(expected, name))
            ]
            if fields:
                raise TraceError(
                    f"{keys.manifest(manifest.step)} in {target.uri}: sample {found.id} differs "
                    f"from {source.uri} in {', '.join(fields)}; {_OTHER_FILE}"
                )


def _same(found: Any, expected: Any) -> bool:
    """Return whether two values of a sample's field are equal; unknown log-probs (NaN) are."""
    if isinstance(found, np.ndarray):
        return np.array_equal(found, expected, equal_nan=found.dtype.kind == "f")
    return same(found, expected)


def _put(target: Store, key: str, data: bytes) -> None:
    """Create an object, unless it already exists with the same content."""
    try:
        target.create(key, data)
    except ObjectExistsError:
        _check_same(target, key, data)


def _check_same(target: Store, key: str, data: bytes) -> None:
    """Raise an error unless an object of a recorded set exists with this content."""
    size = target.size(key)
    if size is None:
        raise ObjectMissingError(
            f"{key} in {target.uri}: no such object, expected the one that the run has; let the "
            "run write it"
        )
    if size != len(data) or target.read(key) != data:
        raise TraceError(f"{key} in {target.uri}: exists with different content; {_OTHER_FILE}")
