"""The part of `verify` that compares a step with its run: replay mode, weights and metrics."""

from collections.abc import Mapping
from typing import Any

from pipeline.policies.versions import WEIGHTS
from pipeline.run import keys
from pipeline.run.amendments import read_amendments
from pipeline.run.commit import CorruptObjectError, find_commit, parsing
from pipeline.run.description import RunDescription
from pipeline.run.parse import digest, field, mapping, number, numbers, same
from pipeline.store import Store
from pipeline.traces.format.manifest import Manifest
from pipeline.traces.read.training import listed_keys
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.stored_run import find_signed

_REPLAY = "actor_rollout_ref.actor.router_replay"
_MODES = ("disabled", "R2", "R3")


def check_settings(run: RunDescription, key: str) -> None:
    """Raise CorruptObjectError unless a run's replay settings and number of steps are valid.

    Args:
        run: The run's description.
        key: The object that determines the settings: run.json, or the last amendment.
    """
    trainer = run.settings.get("trainer", {})
    if "total_training_steps" in trainer:
        try:
            field(trainer, "total_training_steps", number)
        except ValueError as error:
            raise CorruptObjectError(f"{key}: {error}, expected the number of steps") from error
    replay = mapping(run.setting(_REPLAY))
    file = replay.get("record_file")
    if replay.get("mode") not in _MODES or not isinstance(file, str | None):
        raise CorruptObjectError(
            f"{key}: {_REPLAY} has the mode {replay.get('mode')!r} and the record_file "
            f"{file!r}, expected one of {', '.join(_MODES)} as mode, and a string or null as "
            "record_file"
        )


def verify_step_of_run(
    store: Store, run: RunDescription, manifest: Manifest, report: Report
) -> None:
    """Compare a sealed step with its run's settings and policies.

    A step of format 1.0 does not record these. For such a step of a run that records routes, only
    the existence of the trainer's commits is checked.

    Args:
        store: The run's store.
        run: The run's description.
        manifest: The manifest of the step.
        report: Receives problems.
    """
    key = keys.manifest(manifest.step)
    with report.noting(key):
        replay = mapping(run.setting(_REPLAY))
        mode, source = replay.get("mode"), replay.get("replay_file")
        records = mode == "R2" and source is None
        if manifest.format == "1.0":
            replayed = manifest.provenance is not None and manifest.provenance.kind == "R2"
            if records and not replayed:  # in 1.0, run.json does not name every replayed set
                _verify_recorded_1_0(store, manifest.step)
            return
        if manifest.training != records:
            raise CorruptObjectError(
                f"{key}: training is {manifest.training}, but {keys.run_json()} has the mode "
                f"{mode!r} with replay_file {source!r}; restore whichever of these was changed"
            )
        if source is None:
            _compare(store, key, manifest.policies, report)
        elif not replay.get("replay_other_weights"):
            # Only policy 0 is compared, because later policies of this run may have other weights
            # than those of the run that recorded the set.
            theirs = manifest.policies or {}
            _compare(store, key, {v: theirs[v] for v in theirs if v == 0}, report)


def _verify_recorded_1_0(store: Store, step: int) -> None:
    """Raise an error if a trained step of format 1.0 lacks the routes that its run records."""
    trained = store.size(keys.metrics(step)) is not None
    there = store.size(keys.training_set(step)) is not None or listed_keys(store, step)
    if trained and not there:
        raise CorruptObjectError(
            f"{keys.trainings(step)}: no commits, but the step was trained, and {keys.run_json()} "
            "has the mode 'R2', in which the trainer records routes; restore the objects"
        )


def verify_weights(
    store: Store, key: str, policies: Mapping[int, str] | None, report: Report
) -> None:
    """Compare the weights digests in an object of a run with the digests of the run's policies.

    Args:
        store: The run's store.
        key: Key of the object.
        policies: The object's weights digests, keyed by policy version; None if it lists none.
        report: Receives problems.
    """
    with report.noting(key):
        _compare(store, key, policies, report)


def verify_metrics(store: Store, step: int, manifest: Manifest | None, report: Report) -> None:
    """Check a step's metrics: their values, their step, and the policy version that they name.

    Args:
        store: The run or recorded set.
        step: The step.
        manifest: The manifest of the step; None if it is missing or unreadable.
        report: Receives problems.
    """
    key = keys.metrics(step)
    with report.noting(key):
        body = find_signed(store, key)
        if body is None:
            return
        if not same(body.get("step"), step):
            raise CorruptObjectError(f"{key}: step {body.get('step')!r}, expected {step}")
        with parsing(store, key):
            field(body, "metrics", numbers)
            if body.get("agreement_by_layer") is not None:
                field(body, "agreement_by_layer", numbers)
            for name in body.keys() & {"policy_sha256", "layout_sha256"}:
                field(body, name, digest)
        version = body.get("policy_version")
        if manifest is not None and "policy_version" in body and version != manifest.policy_version:
            raise CorruptObjectError(
                f"{key}: policy version {version!r}, expected {manifest.policy_version} as in "
                f"{keys.manifest(step)}; restore whichever of these was changed"
            )
        if "policy_sha256" in body:
            _compare(store, key, {step + 1: body["policy_sha256"]}, report)


def _compare(store: Store, key: str, policies: Mapping[int, str] | None, report: Report) -> None:
    """Raise CorruptObjectError if a stored policy's weights differ from those in `policies`.

    Policies of older runs are not compared, because they have a different kind of digest. Policy 0
    is not compared if an amendment changed the model, because its commit may describe the earlier
    model.
    """
    for version, weights in (policies or {}).items():
        policy = _find_policy(store, version, report)
        stored = (policy or {}).get(WEIGHTS, weights)
        if stored != weights and not (version == 0 and _is_amended(store)):
            raise CorruptObjectError(
                f"{key}: policy {version} has weights {weights}, but {keys.policy(version)} has "
                f"{stored}; one of the two belongs to a different run: restore this run's own"
            )


def _find_policy(store: Store, version: int, report: Report) -> dict[str, Any] | None:
    """Return a policy's commit; None if it is missing or damaged. Damage is reported."""
    with report.noting(keys.policy(version)):
        return find_commit(store, keys.policy(version))
    return None


def _is_amended(store: Store) -> bool:
    return any("model" in amendment.inputs for amendment in read_amendments(store))
