"""Recorded sets: sealed steps at a place of their own, and runs that replay them.

A recorded set is laid out like a run's steps: manifest, samples, routes. A run that replays a set
copies each step's objects to steps/N/replay/ and seals the step with them, so the run stays
complete when the set is deleted.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.amendments import description_at
from pipeline.run.commit import MOST_BYTES, CorruptObjectError, read_data, sha256
from pipeline.run.plan import Window, find_step_plans
from pipeline.run.policy import weights_of
from pipeline.store import ObjectExistsError, ObjectMissingError, Store
from pipeline.traces.format.digests import token_digest
from pipeline.traces.format.ids import check_ids, expected_ids, named
from pipeline.traces.format.manifest import Manifest, open_file, open_manifest, read_manifest
from pipeline.traces.format.pruned import is_pruned, refuse_pruned
from pipeline.traces.format.types import Kind, TraceError
from pipeline.traces.read.joined import digested, used_routes
from pipeline.traces.read.reader import read_samples
from pipeline.traces.write.seal import write_manifest

_SAMPLES_AT_ONCE = 256
_MODE = "actor_rollout_ref.actor.router_replay.mode"
_OTHER_WEIGHTS = "actor_rollout_ref.actor.router_replay.replay_other_weights"
_COMPARED_PRUNED = ["id", "token_digest", "reward"]
_COMPARED = [*_COMPARED_PRUNED, "routes_digest"]


@dataclass(frozen=True)
class Expected:
    """What a run expects of a step of a recorded set."""

    prompt_tokens: Mapping[str, npt.NDArray[np.uint32]]
    """Token ids of the staged prompts by row: '17' for the prompt ids '17' and '17.2'."""
    window: Window | None
    """What the run may make in the step; None: any samples, of any policy version."""
    geometry: Geometry | None
    """The model's geometry; None: routes are not replayed."""
    kind: Kind | None
    """The kind that router_replay.mode replays; None: routes are not replayed."""
    weights: str | None
    """Weights digest of the run's policy 0; None: any."""


def write_recorded_set(run: Store, target: Store, step: int) -> None:
    """Copy a sealed step, with the routes that its training used, to a recorded set.

    Nothing happens when the set already holds the same step. Raises TraceError when the step has no
    routes, the set holds another run's step, or the run pruned the step before the set had it.
    """
    if is_pruned(run, step):
        if target.size(keys.manifest(step)) is None:
            refuse_pruned(run, step)
        _refuse_other(run, target, read_manifest(run, step), _COMPARED_PRUNED)
        return
    manifest = digested(run, used_routes(run, step))
    if manifest.geometry is None:
        raise TraceError(f"step {step} of {run.uri}: no routes were recorded, so there is no set")
    _seal_copy(run, target, manifest, lambda key: key)
    for plan in find_step_plans(run, step):  # they hold the sampling parameters
        _put(target, plan.key, run.read(plan.key, MOST_BYTES))


def check_replay(source: Store, step: int, expected: Expected) -> Manifest:
    """Check that a run may replay a step of a recorded set or of another run; return its manifest.

    Every token is compared. Raises ObjectMissingError when the set lacks this step or one of its
    files; TraceError, naming the sample, both digests and the fix, when the set was made from other
    prompts or with another tokenizer, and when samples, policy version, geometry or kind are not
    the expected ones, and when policy 0 had other weights; CorruptObjectError when a file's size
    differs from that in its commit.
    """
    name = f"replay_file {source.uri}, step {step}"
    refuse_pruned(source, step)
    manifest = used_routes(source, step)
    if expected.window is not None:
        _check_planned(name, manifest, expected.window)
    theirs = (manifest.policies or {}).get(0)
    if expected.weights is not None and theirs not in (None, expected.weights):
        raise TraceError(
            f"{name}: its policy 0 has the weights {theirs}, this run's has {expected.weights}; "
            f"use the actor_rollout_ref.model.path of the set's run, or set {_OTHER_WEIGHTS}=True"
        )
    _check_routes(name, manifest, expected)
    _check_files(source, manifest)
    for start in range(0, len(manifest.ids), _SAMPLES_AT_ONCE):
        ids = manifest.ids[start : start + _SAMPLES_AT_ONCE]
        for sample in read_samples(source, manifest, ids):
            row = sample.prompt_id.split(".")[0]
            prompt = expected.prompt_tokens.get(row)
            if prompt is None:
                raise TraceError(
                    f"{name}: sample {sample.id} is of prompt {row}, which this run has not; "
                    "use the data.train_files of the set's run"
                )
            ours = token_digest(np.concatenate([prompt, sample.response_tokens_G]))
            theirs = token_digest(sample.tokens_S)
            if ours != theirs:
                raise TraceError(
                    f"{name}: sample {sample.id} has token digest {theirs}, with this run's "
                    f"prompt and tokenizer it is {ours}; use the data.train_files and "
                    "actor_rollout_ref.model.path of the set's run, or another replay_file"
                )
    return manifest


def names_weights(source: Store, step: int) -> bool:
    """Whether a sealed step says with which weights of policy 0 it was made."""
    return 0 in (open_manifest(source, step).head.policies or {})


def seal_replay(
    run: Store, source: Store, step: int, window: Window | None, other_weights: bool = False
) -> Manifest:
    """Seal a step of a run with the samples and routes of a recorded set or of another run.

    `window` is what the run may make, with which the samples are compared; None: they are not.
    With `other_weights` the set's policy 0 may be another than the run's.
    A step that is already sealed is returned unchanged. Raises the errors of `check_replay`.
    """
    if run.size(keys.manifest(step)) is None:
        expected = expected_of(run, step, window)
        if not other_weights and names_weights(source, step):
            expected = replace(expected, weights=weights_of(run, 0))
        manifest = digested(source, check_replay(source, step, expected))
        _seal_copy(source, run, manifest, lambda key: keys.replayed(step, key))
    return read_manifest(run, step)


def expected_of(run: Store, step: int, window: Window | None) -> Expected:
    """What a run expects of a replayed step, from its description and what it may make.

    Of weights, which only some steps name, it expects nothing.
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
    """Raise TraceError unless a step has the samples that a run would make, or would choose of."""
    version = window.plans[0].policy_version
    groups = set(manifest.rows["group"].to_pylist())
    rejected = {group.group for group in manifest.rejected}
    if len(window.plans) == 1 and rejected:
        raise TraceError(
            f"{name}: {named('groups were made and not accepted', sorted(rejected))}, and this run "
            "accepts all it makes; use the algorithm.filter_groups of the set's run"
        )
    made = [id for plan in window.made(len(groups | rejected)) for id in expected_ids(plan)]
    expected = [id for id in made if id.rpartition("/")[0] not in rejected]
    check_ids(name, manifest.ids, expected)
    if len(groups) != window.groups:
        raise TraceError(
            f"{name}: {len(groups)} groups, this run trains on {window.groups}; use the "
            "data.train_batch_size of the set's run"
        )
    if manifest.policy_versions != (version,):
        raise TraceError(
            f"{name}: tokens of policy versions {manifest.policy_versions}, this run's plan says "
            f"{version}; use the max_staleness of the set's run"
        )


def _check_routes(name: str, manifest: Manifest, expected: Expected) -> None:
    if expected.kind is None:
        return
    kind = manifest.provenance.kind if manifest.provenance else None
    if kind != expected.kind:
        fix = f"set {_MODE}={kind}" if kind else "it cannot be replayed"
        raise TraceError(f"{name}: its routes are of kind {kind}, not {expected.kind}; {fix}")
    if manifest.geometry != expected.geometry:
        raise TraceError(
            f"{name}: made for {manifest.geometry}, this run's model has {expected.geometry}; "
            "use the actor_rollout_ref.model.path of the set's run"
        )


def _check_files(source: Store, manifest: Manifest) -> None:
    """Raise unless every file of a step exists with its full size; contents are not read."""
    for number in range(len(manifest.files)):
        file, _ = open_file(source, manifest, number)
        size = source.size(file.data.key)
        if size is None:
            raise ObjectMissingError(f"read {file.data.key} in {source.uri}: no such object")
        if size != file.data.size:
            raise CorruptObjectError(
                f"{file.data.key} in {source.uri}: {size} bytes, its commit says "
                f"{file.data.size}; restore the object"
            )


def _seal_copy(
    source: Store, target: Store, manifest: Manifest, renamed: Callable[[str], str]
) -> None:
    """Copy the objects of a manifest and seal the target's step with them."""
    step = manifest.step
    if target.size(keys.manifest(step)) is None:
        refs = []
        for number, ref in enumerate(manifest.files):
            file, _ = open_file(source, manifest, number)
            _put(target, renamed(ref.commit), source.read(ref.commit))
            _put(target, renamed(ref.key), read_data(source, file.data))
            refs.append(replace(ref, key=renamed(ref.key), commit=renamed(ref.commit)))
        write_manifest(target, replace(manifest, files=tuple(refs), training=False))
    _refuse_other(source, target, manifest, _COMPARED)


def _refuse_other(source: Store, target: Store, manifest: Manifest, columns: Sequence[str]) -> None:
    """Raise TraceError unless the target's sealed step has the same samples and routes."""
    step = manifest.step
    there = read_manifest(target, step)
    if not there.rows.select(columns).equals(manifest.rows.select(columns)):
        raise TraceError(
            f"{keys.manifest(step)} in {target.uri}: it has other samples or routes than "
            f"{source.uri}; choose another record_file, or remove what is there"
        )


def _put(target: Store, key: str, data: bytes) -> None:
    """Create an object, unless it exists with the same content."""
    try:
        target.create(key, data)
    except ObjectExistsError as error:
        if target.size(key) != len(data) or sha256(target.read(key)) != sha256(data):
            raise TraceError(
                f"{key} in {target.uri}: it is there with other content; choose another "
                "record_file, or remove what is there"
            ) from error
