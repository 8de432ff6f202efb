"""The part of `verify` that compares a step with its run: its trainer's mode, weights, metrics."""

from collections.abc import Mapping
from typing import Any

from pipeline.run import keys
from pipeline.run.amendments import read_amendments
from pipeline.run.commit import CorruptObjectError, find_commit, parsing
from pipeline.run.description import RunDescription
from pipeline.run.parse import digest, field, mapping, numbers, same
from pipeline.run.policy import WEIGHTS
from pipeline.store import Store
from pipeline.traces.format.manifest import Manifest
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.stored_run import find_signed

_REPLAY = "actor_rollout_ref.actor.router_replay"
_MODES = ("disabled", "R2", "R3")


def check_mode(run: RunDescription) -> None:
    """Raise CorruptObjectError unless a run's settings of replay are of a mode that there is."""
    replay = mapping(run.setting(_REPLAY))
    file = replay.get("record_file")
    if replay.get("mode") not in _MODES or not isinstance(file, str | None):
        raise CorruptObjectError(
            f"{keys.run_json()}: {_REPLAY} has the mode {replay.get('mode')!r} and record_file "
            f"{file!r}, expected a mode of {', '.join(_MODES)} and a text or null"
        )


def verify_step_of_run(
    store: Store, run: RunDescription, manifest: Manifest, report: Report
) -> None:
    """Compare what a sealed step of format 1.1 says with its run's settings and policies."""
    if manifest.format == "1.0":
        return
    key = keys.manifest(manifest.step)
    with report.noting(key):
        replay = mapping(run.setting(_REPLAY))
        mode, source = replay.get("mode"), replay.get("replay_file")
        records = mode == "R2" and source is None
        if manifest.training != records:
            raise CorruptObjectError(
                f"{key}: training is {manifest.training}, but {keys.run_json()} has the mode "
                f"{mode!r} with replay_file {source!r}; restore the object"
            )
        if source is None:
            _compare(store, key, manifest.policies, report)
        elif not replay.get("replay_other_weights"):
            # Later policies of the set's run may have had other weights.
            theirs = manifest.policies or {}
            _compare(store, key, {v: theirs[v] for v in theirs if v == 0}, report)


def verify_weights(
    store: Store, key: str, policies: Mapping[int, str] | None, report: Report
) -> None:
    """Compare the weights that an object of a run's own names with the run's policies."""
    with report.noting(key):
        _compare(store, key, policies, report)


def verify_metrics(store: Store, step: int, manifest: Manifest | None, report: Report) -> None:
    """Check a step's metrics: numbers, and what they say of the step and of the policy it made."""
    key = keys.metrics(step)
    with report.noting(key):
        body = find_signed(store, key)
        if body is None:
            return
        if not same(body.get("step"), step):
            raise CorruptObjectError(f"{key}: of step {body.get('step')!r}, expected step {step}")
        with parsing(store, key):
            field(body, "metrics", numbers)
            if body.get("agreement_by_layer") is not None:
                field(body, "agreement_by_layer", numbers)
            for name in body.keys() & {"policy_sha256", "layout_sha256"}:
                field(body, name, digest)
        version = body.get("policy_version")
        if manifest is not None and "policy_version" in body and version != manifest.policy_version:
            raise CorruptObjectError(
                f"{key}: policy version {version!r}, {keys.manifest(step)} says "
                f"{manifest.policy_version}; restore the object"
            )
        if "policy_sha256" in body:
            _compare(store, key, {step + 1: body["policy_sha256"]}, report)


def _compare(store: Store, key: str, policies: Mapping[int, str] | None, report: Report) -> None:
    """Raise CorruptObjectError where a policy that is stored has other weights than are named.

    Policies of older runs have another digest, and the commit of policy 0 is not that of the
    model that an amendment gave the run.
    """
    for version, weights in (policies or {}).items():
        policy = _find_policy(store, version, report)
        stored = (policy or {}).get(WEIGHTS, weights)
        if stored != weights and not (version == 0 and _is_amended(store)):
            raise CorruptObjectError(
                f"{key}: policy {version} has weights {weights}, {keys.policy(version)} says "
                f"{stored}; restore the object that is of another run"
            )


def _find_policy(store: Store, version: int, report: Report) -> dict[str, Any] | None:
    """A policy's commit; None: it is not there, or is damaged, which is in the report then."""
    with report.noting(keys.policy(version)):
        return find_commit(store, keys.policy(version))
    return None


def _is_amended(store: Store) -> bool:
    return any("model" in amendment.inputs for amendment in read_amendments(store))
