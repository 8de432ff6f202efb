"""Recorded sets: copies of sealed steps in a separate store. Runs can replay these copies.

The steps of a recorded set have the same layout as a run's steps: manifest, samples and routes. A
run that replays a set copies each step's objects to steps/N/replay/ and seals the step with the
copies. The run therefore remains complete even if the set is deleted.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.model.geometry import Geometry
from pipeline.policies.versions import weights_of
from pipeline.run import keys
from pipeline.run.amendments import description_at
from pipeline.run.commit import MOST_BYTES, read_data
from pipeline.run.plan import Window, find_step_plans
from pipeline.store import ObjectExistsError, ObjectMissingError, Store
from pipeline.traces.format.chunks import check_size
from pipeline.traces.format.digests import token_digest
from pipeline.traces.format.ids import check_ids, expected_ids, named
from pipeline.traces.format.manifest import (
    Manifest,
    is_pruned,
    open_file,
    open_manifest,
    read_manifest,
    refuse_pruned,
)
from pipeline.traces.format.types import Kind, TraceError
from pipeline.traces.read.joined import digested, used_routes
from pipeline.traces.read.reader import every_sample, read_samples
from pipeline.traces.read.training import find_training_set
from pipeline.traces.write.seal import write_manifest

_MODE = "actor_rollout_ref.actor.router_replay.mode"
_OTHER_WEIGHTS = "actor_rollout_ref.actor.router_replay.replay_other_weights"
_OTHER_FILE = "choose a different record_file, or remove the existing objects"
_COMPARED_R2_PRUNED = ["id", "token_digest", "reward"]
_COMPARED = [*_COMPARED_R2_PRUNED, "routes_digest"]


@dataclass(frozen=True)
class Expected:
    """The properties that a step of a recorded set must have to be replayed by a run."""

    prompt_tokens: Mapping[str, npt.NDArray[np.uint32]]
    """Token ids of the staged prompts, keyed by row of the prompt table. The prompt ids '17' and
    '17.2' both have the key '17'."""
    window: Window | None
    """The samples that the run may generate in the step; None allows any samples, from any policy
    version."""
    geometry: Geometry | None
    """The model's geometry; None if routes are not replayed."""
    kind: Kind | None
    """The kind of routes that router_replay.mode replays; None if routes are not replayed."""
    weights: str | None
    """Weights digest of the run's policy 0; None allows any weights."""


def write_recorded_set(run: Store, target: Store, step: int) -> None:
    """Copy a sealed step, with the routes that its training used, to a recorded set.

    If the set already contains the same step, only the files and plans that it lacks are copied.
    The plans are copied last, and plan.json as the very last object.

    Args:
        run: Store of the run.
        target: Store of the recorded set.
        step: The step to copy.

    Raises:
        ObjectMissingError: The set lacks a file that the run does not have.
        CorruptObjectError: An object of the set or of the run is damaged.
        TraceError: The step has no routes, the set already contains a different step with this
            number (see `check_recorded`), or the run's step was pruned before it was copied.
    """
    if is_pruned(run, step):
        if target.size(keys.manifest(step)) is None:
            refuse_pruned(run, step)
        _refuse_other_pruned(run, target, step)
    else:
        manifest = digested(run, used_routes(run, step))
        if manifest.geometry is None:
            raise TraceError(
                f"step {step} of {run.uri}: no routes were recorded, so it cannot be in a recorded "
                "set"
            )
        _seal_copy(run, target, manifest, lambda key: key)
        if not is_pruned(target, step):
            _refuse_other_samples(run, target, manifest)
    # Plans contain the sampling parameters. A set that has plan.json has all plans of the step.
    for plan in reversed(find_step_plans(run, step)):
        _put(target, plan.key, run.read(plan.key, MOST_BYTES))


def check_replay(source: Store, step: int, expected: Expected) -> Manifest:
    """Check that a run may replay a step of a recorded set or of another run.

    The token digest of every sample is compared with the digest that results from this run's prompt
    and tokenizer. If the digests differ, the error names the sample, both digests and the fix.

    Args:
        source: Store of the set or run to replay.
        step: The step.
        expected: The properties that the step must have.

    Returns:
        The step's manifest, with the routes that its training used.

    Raises:
        ObjectMissingError: The set lacks this step or one of its files.
        CorruptObjectError: A file's size differs from the size in its commit.
        TraceError: The set was recorded with different prompts or a different tokenizer; its
            policy 0 has different weights; or its samples, policy version, geometry or kind of
            routes are not as expected.
    """
    name = f"replay_file {source.uri}, step {step}"
    refuse_pruned(source, step)
    manifest = used_routes(source, step)
    if expected.window is not None:
        _check_planned(name, manifest, expected.window)
    theirs = (manifest.policies or {}).get(0)
    if expected.weights is not None and theirs not in (None, expected.weights):
        raise TraceError(
            f"{name}: policy 0 has weights {theirs}, this run's policy 0 has {expected.weights}; "
            f"use the actor_rollout_ref.model.path of the set's run, or set {_OTHER_WEIGHTS}=True"
        )
    _check_routes(name, manifest, expected)
    _check_files(source, manifest)
    for sample in every_sample(source, manifest):
        row = sample.prompt_id.split(".")[0]
        prompt = expected.prompt_tokens.get(row)
        if prompt is None:
            raise TraceError(
                f"{name}: sample {sample.id} has prompt {row}, which is not in this "
                "run's prompt table; use the data.train_files of the set's run"
            )
        ours = token_digest(np.concatenate([prompt, sample.response_tokens_G]))
        theirs = token_digest(sample.tokens_S)
        if ours != theirs:
            raise TraceError(
                f"{name}: sample {sample.id} has token digest {theirs}; with this run's "
                f"prompt and tokenizer it is {ours}; use the data.train_files and "
                "actor_rollout_ref.model.path of the set's run, or a different replay_file"
            )
    return manifest


def check_recorded(run: Store, target: Store, step: int) -> None:
    """Raise an error unless a recorded set contains a run's sealed step with its files and plans.

    Routes are compared by their digests, and so are samples files. Samples are read and compared
    only if the set has other samples files than the run. Apart from this, the sizes of the set's
    files are checked, not their content.

    Args:
        run: The run's store.
        target: The recorded set.
        step: The step.

    Raises:
        ObjectMissingError: The set lacks the step, one of its files or one of its plans.
        CorruptObjectError: A file has the wrong size, or a commit or a samples file is damaged.
        TraceError: The set's step was pruned, or contains other samples, routes or plans.
    """
    refuse_pruned(target, step)
    _check_files(target, read_manifest(target, step))
    used = digested(run, used_routes(run, step))
    _refuse_other(run, target, used, _COMPARED)
    _refuse_other_samples(run, target, used)
    for plan in find_step_plans(run, step):
        _check_same(target, plan.key, run.read(plan.key, MOST_BYTES))


def names_weights(source: Store, step: int) -> bool:
    """Return whether a sealed step records the weights digest of policy 0."""
    return 0 in (open_manifest(source, step).head.policies or {})


def seal_replay(
    run: Store, source: Store, step: int, window: Window | None, other_weights: bool = False
) -> Manifest:
    """Seal a step of a run with the samples and routes from a recorded set or another run.

    Args:
        run: Store of the run.
        source: Store of the set or run to replay.
        step: The step.
        window: The samples that the run may generate; None accepts any samples.
        other_weights: Whether the set's policy 0 may differ from the run's policy 0.

    Returns:
        The run's sealed manifest. A step that is already sealed remains unchanged.

    Raises:
        ObjectMissingError: The set lacks this step or one of its files.
        CorruptObjectError: A file in the set is damaged.
        TraceError: The run may not replay the step; see `check_replay`.
    """
    if run.size(keys.manifest(step)) is None:
        expected = expected_of(run, step, window)
        if not other_weights and names_weights(source, step):
            expected = replace(expected, weights=weights_of(run, 0))
        manifest = digested(source, check_replay(source, step, expected))
        _seal_copy(source, run, manifest, lambda key: keys.replayed(step, key))
    return read_manifest(run, step)


def expected_of(run: Store, step: int, window: Window | None) -> Expected:
    """Return the properties that a run requires of a replayed step.

    The weights digest of policy 0 is left out, because not every step records it.

    Args:
        run: Store of the run, from which the run's description is read.
        step: The step.
        window: The samples that the run may generate; None allows any samples.
    """
    description = description_at(run, step)
    mode = description.setting(_MODE)
    prompts = description.inputs.prompts
    table = pq.read_table(io.BytesIO(read_data(run, prompts)), columns=["prompt_id", "token_ids"])
    tokens = {
        str(row): np.asarray(ids, np.uint32)
        for row, ids in zip(*(column.to_pylist() for column in table.columns), strict=True)
    }
    return Expected(
        prompt_tokens=tokens,
        window=window,
        geometry=None if mode == "disabled" else description.geometry,
        kind=None if mode == "disabled" else mode,
        weights=None,
    )


def _check_planned(name: str, manifest: Manifest, window: Window) -> None:
    """Raise TraceError unless a step has exactly the samples on which the run could train."""
    version = window.plans[0].policy_version
    groups = set(manifest.rows["group"].to_pylist())
    rejected = {group.group for group in manifest.rejected}
    if len(window.plans) == 1 and rejected:
        raise TraceError(
            f"{name}: {named('rejected groups', sorted(rejected))}; this run "
            "accepts all of its groups; use the algorithm.filter_groups of the set's run"
        )
    made = [id for plan in window.made(len(groups | rejected)) for id in expected_ids(plan)]
    expected = [id for id in made if id.rpartition("/")[0] not in rejected]
    check_ids(name, manifest.ids, expected)
    if len(groups) != window.groups:
        raise TraceError(
            f"{name}: {len(groups)} groups, but this run trains on {window.groups}; use the "
            "data.train_batch_size of the set's run"
        )
    if manifest.policy_versions != (version,):
        raise TraceError(
            f"{name}: tokens from policy versions {manifest.policy_versions}, but this run's plan "
            f"has {version}; use the max_staleness of the set's run"
        )


def _check_routes(name: str, manifest: Manifest, expected: Expected) -> None:
    if expected.kind is None:
        return
    kind = manifest.provenance.kind if manifest.provenance else None
    if kind != expected.kind:
        fix = f"set {_MODE}={kind}" if kind else "the step cannot be replayed"
        raise TraceError(f"{name}: its routes are of kind {kind}, expected {expected.kind}; {fix}")
    if manifest.geometry != expected.geometry:
        raise TraceError(
            f"{name}: routes for {manifest.geometry}, but this run's model has "
            f"{expected.geometry}; use the actor_rollout_ref.model.path of the set's run"
        )


def _check_files(source: Store, manifest: Manifest) -> None:
    """Raise an error unless every file of a step exists and has its full size. Reads no files."""
    for number in range(len(manifest.files)):
        file, _ = open_file(source, manifest, number)
        check_size(source, file)


def _seal_copy(
    source: Store, target: Store, manifest: Manifest, renamed: Callable[[str], str]
) -> None:
    """Copy the objects that a manifest lists, and seal the target's step with the copies.

    If the target's step is already sealed, only the files that it lacks are copied.
    """
    step = manifest.step
    if target.size(keys.manifest(step)) is None:
        refs = []
        for number, ref in enumerate(manifest.files):
            file, _ = open_file(source, manifest, number)
            _put(target, renamed(ref.key), read_data(source, file.data))
            refs.append(replace(ref, key=renamed(ref.key), commit=renamed(ref.commit)))
        for commit in sorted({ref.commit for ref in manifest.files}):  # after the files they name
            _put(target, renamed(commit), source.read(commit))
        write_manifest(target, replace(manifest, files=tuple(refs), training=False))
    _refuse_other(source, target, manifest, _COMPARED)
    if not is_pruned(target, step):
        _complete(source, target, manifest)


def _complete(source: Store, target: Store, manifest: Manifest) -> None:
    """Copy the files that the target's sealed step lacks, and check the sizes of all its files."""
    ours = {ref.sha256: number for number, ref in enumerate(manifest.files)}
    there = read_manifest(target, manifest.step)
    for ref in there.files:
        if ref.sha256 in ours and target.size(ref.key) is None:
            file, _ = open_file(source, manifest, ours[ref.sha256])
            _put(target, ref.key, read_data(source, file.data))
    _check_files(target, there)


def _refuse_other_pruned(run: Store, target: Store, step: int) -> None:
    """Raise TraceError unless the target's sealed step fits what remains of a run's pruned step.

    If the trainer recorded the routes (R2), their digests were not in the run's manifest.
    """
    manifest = read_manifest(run, step)
    training = find_training_set(run, manifest)
    if training is None:
        _refuse_other(run, target, manifest, _COMPARED)
        return
    used = replace(manifest, geometry=training.geometry, provenance=training.provenance)
    _refuse_other(run, target, used, _COMPARED_R2_PRUNED)


def _refuse_other(source: Store, target: Store, manifest: Manifest, columns: Sequence[str]) -> None:
    """Raise TraceError unless the target's sealed step has the same samples and routes."""
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
    ours, theirs = (one.rows.select(columns).sort_by("id") for one in (manifest, there))
    if not theirs.equals(ours):
        pairs = zip_longest(theirs.to_pylist(), ours.to_pylist())
        sample = next((one or two)["id"] for one, two in pairs if one != two)
        raise TraceError(
            f"{name}: its samples or routes differ from those in {source.uri}, beginning with "
            f"sample {sample}; {_OTHER_FILE}"
        )


def _refuse_other_samples(source: Store, target: Store, manifest: Manifest) -> None:
    """Raise TraceError if samples differ in what a manifest's rows do not contain, as log-probs."""
    there = read_manifest(target, manifest.step)
    if _samples_files(there) == _samples_files(manifest):
        return
    for ids in manifest.id_batches():
        pairs = zip(
            read_samples(target, there, ids), read_samples(source, manifest, ids), strict=True
        )
        for found, expected in pairs:
            names = [
                n for n, value in vars(found).items() if not _same(value, getattr(expected, n))
            ]
            if names:
                raise TraceError(
                    f"{keys.manifest(manifest.step)} in {target.uri}: sample {found.id} differs "
                    f"from {source.uri} in {', '.join(names)}; {_OTHER_FILE}"
                )


def _samples_files(manifest: Manifest) -> set[str]:
    """Return the digests of the files that contain a step's samples."""
    numbers = pc.unique(pc.struct_field(manifest.rows["samples"], "file")).to_pylist()
    return {manifest.files[number].sha256 for number in numbers}


def _same(found: Any, expected: Any) -> bool:
    """Return whether two values of a sample's field are equal; unknown log-probs (NaN) are."""
    if isinstance(found, np.ndarray):
        return np.array_equal(found, expected, equal_nan=found.dtype.kind == "f")
    return bool(found == expected)


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
