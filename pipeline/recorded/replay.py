"""Replaying the steps of a recorded set, or of another run, in a run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.policies.versions import weights_of
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, put_bytes, read_data
from pipeline.run.description import description_now, run_digest
from pipeline.run.plan import Window
from pipeline.run.prompt_table import StoredPrompts
from pipeline.store import ObjectMissingError, Store
from pipeline.traces.format.ids import check_ids, expected_ids, named
from pipeline.traces.format.manifest import (
    Manifest,
    open_manifest,
    read_manifest,
    refuse_pruned,
)
from pipeline.traces.format.routes import token_digest
from pipeline.traces.format.types import Kind, Sample, TraceError
from pipeline.traces.read.reader import every_sample, read_routes
from pipeline.traces.read.trainer import used_routes
from pipeline.traces.write.seal import write_manifest

_MODE = "actor_rollout_ref.actor.router_replay.mode"
_OTHER_WEIGHTS = "actor_rollout_ref.actor.router_replay.replay_other_weights"


@dataclass(frozen=True)
class Expected:
    """The properties that a step of a recorded set must have to be replayed by a run."""

    prompts: StoredPrompts
    """The staged prompts. The prompt ids '17' and '17.2' both refer to row 17."""
    window: Window | None
    """The samples that the run may generate in the step; None allows any samples, from any policy
    version."""
    geometry: Geometry | None
    """The model's geometry; None if routes are not replayed."""
    kind: Kind | None
    """The kind of routes that router_replay.mode replays; None if routes are not replayed."""
    weights: str | None
    """Weights digest of the run's policy 0; None allows any weights."""


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
            policy 0 has different weights; its samples, policy version, geometry or kind of routes
            are not as expected; or the routes of a finished response are incomplete.
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
    tokens = expected.prompts.tokens({_row(id) for id in manifest.rows["prompt_id"].to_pylist()})
    total = manifest.rows["rows_total"].to_pylist()
    valid = manifest.rows["rows_valid"].to_pylist()
    partial = {id for id, *rows in zip(manifest.ids, total, valid, strict=True) if len({*rows}) > 1}
    required: dict[str, npt.NDArray[np.bool_]] = {}
    for sample in every_sample(source, manifest):
        if expected.kind is not None and sample.id in partial and sample.finish_reason != "abort":
            required[sample.id] = _required_rows(sample)
        row = _row(sample.prompt_id)
        prompt = tokens.get(row)
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
    _check_known(name, source, manifest, required)
    return manifest


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
        expected = expected_of(run, window)
        if not other_weights and names_weights(source, step):
            expected = replace(expected, weights=weights_of(run, 0))
        manifest = check_replay(source, step, expected)
        _seal_copies(run, source, manifest)
    return read_manifest(run, step)


def expected_of(run: Store, window: Window | None) -> Expected:
    """Return the properties that a run requires of a replayed step.

    The weights digest of policy 0 is left out, because not every step records it.

    Args:
        run: Store of the run, from which the run's description is read.
        window: The samples that the run may generate; None allows any samples.
    """
    description = description_now(run)
    mode = description.setting(_MODE)
    return Expected(
        prompts=StoredPrompts.of(run, description.inputs.prompts),
        window=window,
        geometry=None if mode == "disabled" else description.geometry,
        kind=None if mode == "disabled" else mode,
        weights=None,
    )


def _row(prompt_id: str) -> str:
    return prompt_id.partition(".")[0]


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


def _required_rows(sample: Sample) -> npt.NDArray[np.bool_]:
    """Return the rows of a finished response whose routing must be known, bool [S - 1].

    Only the routing of tokens that an environment inserted, which are not in the loss, may be
    unknown.
    """
    prompt_P = np.ones(len(sample.prompt_tokens_P), np.bool_)
    required_S: npt.NDArray[np.bool_] = np.concatenate([prompt_P, sample.loss_mask_G])
    return required_S[:-1]


def _check_known(
    name: str, source: Store, manifest: Manifest, required: Mapping[str, npt.NDArray[np.bool_]]
) -> None:
    """Raise TraceError for a sample whose required rows are not all valid."""
    for ids in manifest.id_batches(required):
        for id, routes in read_routes(source, manifest, ids).items():
            unknown = np.flatnonzero(required[id] & ~routes.valid_T)
            if len(unknown):
                raise TraceError(
                    f"{name}: sample {id}: the routing of {len(unknown)} of {len(routes.valid_T)} "
                    f"rows is unknown (rows {unknown[0]} to {unknown[-1]}), but the response is "
                    "finished, so all rows of its prompt and of tokens in the loss must be valid; "
                    f"use a set with complete routes, or set {_MODE}=disabled"
                )


def _check_files(source: Store, manifest: Manifest) -> None:
    """Raise an error unless every file of a step exists and has its full size. Reads no files."""
    sizes = {info.key: info.size for info in source.list(keys.step_prefix(manifest.step))}
    for file in manifest.files:
        if file.key not in sizes:
            raise ObjectMissingError(
                f"{file.key} in {source.uri}: no such object; restore it, or use another "
                "replay_file"
            )
        if sizes[file.key] != file.size:
            raise CorruptObjectError(
                f"{file.key} in {source.uri}: {sizes[file.key]} bytes, but its commit records "
                f"{file.size}; restore the object, or use another replay_file"
            )


def _seal_copies(run: Store, source: Store, manifest: Manifest) -> None:
    """Copy the data files of a set's step to a run, and seal the run's step with the copies."""
    copies = []
    for file in manifest.files:
        copy = replace(file, key=keys.replayed(manifest.step, file.key))
        if run.size(copy.key) is None:
            put_bytes(run, copy.key, read_data(source, file.data))
        else:
            read_data(run, copy.data)  # written by an earlier start of the run
        copies.append(copy)
    head = replace(manifest, files=tuple(copies), training=False, run=run_digest(run))
    write_manifest(run, head)
