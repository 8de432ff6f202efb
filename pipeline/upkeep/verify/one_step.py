"""The part of `verify` that checks one step: shards, manifest, samples, routes and metrics."""

import json
import re
from collections.abc import Mapping, Sequence

from pipeline.policies.versions import WEIGHTS
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, find_commit, find_commit_of, parsing
from pipeline.run.description import RunDescription, newest_changes
from pipeline.run.parse import typed
from pipeline.run.plan import StepPlan, find_step_plans
from pipeline.store import Store
from pipeline.traces.format.header import Header, TraceFile, read_header
from pipeline.traces.format.ids import check_ids, expected_ids
from pipeline.traces.format.manifest import Manifest, is_pruned, open_manifest
from pipeline.traces.format.parquet import open_file
from pipeline.traces.format.routes import token_digest
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.reader import read_routes, read_samples
from pipeline.traces.read.trainer import TrainerRoutes, find_trainer_routes, joined
from pipeline.upkeep.problems import Report
from pipeline.upkeep.prune import check_pruned, data_files
from pipeline.upkeep.verify.contents import verify_data

_SHARD = re.compile(r"steps/\d{6}/rollout/(\d{5})\.json")


def verify_step(
    store: Store, step: int, run: RunDescription | None, digest: str | None, report: Report
) -> None:
    """Check the existing objects of a step. An unfinished step does not have a manifest yet.

    Args:
        store: The run or recorded set.
        step: The step.
        run: The run's description; None for a recorded set.
        digest: The digest of run.json; None for a recorded set.
        report: Receives problems and counts.
    """
    before, found = len(report.problems), report.found
    pruned = is_pruned(store, step)
    _verify(store, step, run, digest, report, pruned)
    if not pruned and report.found > found and is_pruned(store, step):
        # It was pruned while it was being read, so missing files are expected.
        del report.problems[before:]
        pruned = True
        _verify(store, step, run, digest, report, pruned)
    if store.size(keys.manifest(step)) is not None:
        report.steps += 1
        report.pruned += pruned


def _verify(
    store: Store,
    step: int,
    run: RunDescription | None,
    digest: str | None,
    report: Report,
    pruned: bool,
) -> None:
    plans: list[StepPlan] = []
    with report.noting(keys.plan(step)):
        if run is not None or store.size(keys.plan(step)) is not None:  # a set gets plan.json last
            plans = find_step_plans(store, step)
    shards = _verify_shards(store, step, digest, report, pruned)
    _verify_metrics(store, step, report)
    if store.size(keys.manifest(step)) is None:
        return
    with report.noting(keys.manifest(step)):
        sealed = open_manifest(store, step)
        if not verify_data(store, sealed.file.data, report, keys.manifest(step)):
            return
        manifest = sealed.all()
        report.samples += len(manifest.ids)
        _check_run(keys.manifest(step), manifest.run, digest)
        _check_manifest(store, manifest, run, plans, report)
        _check_shards(manifest, sealed.shards, shards, pruned)
        trainer = _trainer(store, manifest, report)
        if pruned:
            with report.noting(keys.pruned(step)):
                body = find_commit(store, keys.pruned(step)) or {}
                check_pruned(body, step, data_files(store, step))
            return
        files = [*manifest.files, *(trainer.files if trainer else ())]
        right = [_verify_file(store, file, manifest, report) for file in files]
        if all(right):
            _verify_rows(store, manifest, trainer, report)


def _check_run(key: str, found: str | None, digest: str | None) -> None:
    """Raise TraceError if an object belongs to another run. A recorded set may be of any run."""
    if digest is not None and found not in (None, digest):
        raise TraceError(
            f"{key}: it belongs to the run with description {found:.16}..., but {keys.run_json()} "
            f"has {digest:.16}...; restore this run's own"
        )


def _verify_shards(
    store: Store, step: int, digest: str | None, report: Report, pruned: bool
) -> dict[int, Header]:
    """Check the step's shards; return the readable commits, keyed by number."""
    found = {}
    for info in store.list(keys.step_prefix(step) + "rollout/"):
        if (match := _SHARD.fullmatch(info.key)) is None:
            continue
        place = {"step": step, "shard": int(match[1])}
        with report.noting(info.key):
            header = found[int(match[1])] = read_header(store, info.key, place)
            _check_run(info.key, header.run, digest)
            for file in () if pruned else header.files:
                if verify_data(store, file.data, report, info.key):
                    _check_origin(store, file, place)
    return found


def _check_origin(store: Store, file: TraceFile, place: Mapping[str, int]) -> None:
    """Raise TraceError unless a file's footer names the place to which its commit assigns it."""
    metadata = open_file(store, file).metadata.metadata or {}
    origin = json.loads(metadata.get(b"retrace.origin", b"{}"))
    if (found := {name: origin.get(name) for name in place}) != dict(place):
        raise TraceError(
            f"{file.key}: a file of {found}, expected {dict(place)}; restore the object"
        )


def _check_manifest(
    store: Store,
    manifest: Manifest,
    run: RunDescription | None,
    plans: Sequence[StepPlan],
    report: Report,
) -> None:
    """Compare a manifest with its step's plans, its run's model, and the run's policies."""
    key = keys.manifest(manifest.step)
    rejected = {group.group for group in manifest.rejected}
    if plans:
        planned = (id for plan in plans for id in expected_ids(plan))
        check_ids(
            key, manifest.ids, [id for id in planned if id.rpartition("/")[0] not in rejected]
        )
        if manifest.policy_versions != (plans[0].policy_version,):
            raise TraceError(
                f"{key}: policy versions {manifest.policy_versions}, expected "
                f"{plans[0].policy_version} as in {plans[0].key}"
            )
    if run is not None and manifest.geometry not in (None, run.geometry):
        raise TraceError(
            f"{key}: made for {manifest.geometry}, but the run's model has {run.geometry}"
        )
    if run is not None and not any(
        file.key.startswith(keys.replays(manifest.step)) for file in manifest.files
    ):
        _check_weights(store, key, manifest.policies or {}, report)


def _check_weights(store: Store, key: str, policies: Mapping[int, str], report: Report) -> None:
    """Compare the weights digests in an object of a run with those of the run's policies."""
    for version, weights in policies.items():
        policy: Mapping[str, object] = {}
        with report.noting(keys.policy(version)):
            policy = find_commit(store, keys.policy(version)) or {}
        stored = policy.get(WEIGHTS, weights)
        # The commit of policy 0 describes the model in run.json, even if an attempt staged another.
        if stored != weights and not (version == 0 and newest_changes(store)):
            raise CorruptObjectError(
                f"{key}: policy {version} has weights {weights}, but {keys.policy(version)} has "
                f"{stored}; one of the two belongs to a different run: restore this run's own"
            )


def _check_shards(
    manifest: Manifest, count: int, shards: Mapping[int, Header], pruned: bool
) -> None:
    """Raise TraceError unless a step was sealed with exactly the files of its shards."""
    key = keys.manifest(manifest.step)
    if missing := sorted(set(range(count)) - shards.keys()):
        raise TraceError(
            f"{keys.rollout(manifest.step, missing[0])}: no such object, or damaged, but {key} "
            f"was sealed with {count} shards"
        )
    expected = {file for number in range(count) for file in shards[number].files}
    found = {
        file for file in manifest.files if not file.key.startswith(keys.replays(manifest.step))
    }
    if found != expected:
        one = min(file.key for file in found ^ expected)
        raise TraceError(f"{key}: {one} is not as in its shard's commit; restore the object")


def _trainer(store: Store, manifest: Manifest, report: Report) -> TrainerRoutes | None:
    """Return the step's trainer routes; None if there are none, or none yet."""
    key = keys.trainer_routes(manifest.step)
    trained = store.size(keys.metrics(manifest.step)) is not None  # asked first: written later
    if store.size(key) is None:
        if manifest.training and trained:
            report.add(
                key, f"no such object, but the step was trained: {keys.metrics(manifest.step)}"
            )
        return None
    if not manifest.training:
        report.add(
            key,
            f"it exists, but according to {keys.manifest(manifest.step)} the trainer records no "
            "routes; remove it, or restore the manifest",
        )
        return None
    with report.noting(key):
        return find_trainer_routes(store, manifest)
    return None


def _verify_file(store: Store, file: TraceFile, manifest: Manifest, report: Report) -> bool:
    if not verify_data(store, file.data, report, keys.manifest(manifest.step)):
        return False
    with report.noting(file.key):
        _check_origin(store, file, {"step": manifest.step})
        return True
    return False


def _verify_rows(
    store: Store, manifest: Manifest, trainer: TrainerRoutes | None, report: Report
) -> None:
    """Read every sample and every route with the normal reader."""
    for ids in manifest.id_batches():
        digests = manifest.select(ids)["token_digest"].to_pylist()
        for sample, expected in zip(read_samples(store, manifest, ids), digests, strict=True):
            if token_digest(sample.tokens_S) != expected:
                report.add(
                    keys.manifest(manifest.step),
                    f"token digest {expected}, but the sample's tokens have another",
                    sample.id,
                )
        if manifest.geometry is not None:
            read_routes(store, manifest, ids)
    if trainer is not None:
        with report.noting(keys.trainer_routes(manifest.step)):
            trained = joined(store, manifest, trainer)
            for ids in trained.id_batches():
                read_routes(store, trained, ids)


def _verify_metrics(store: Store, step: int, report: Report) -> None:
    """Check a step's metrics: their step, their values, and the policy that they name."""
    key = keys.metrics(step)
    with report.noting(key):
        body = find_commit_of(store, key, {"step": step})
        if body is None:
            return
        with parsing(store, key):
            typed(body, "metrics", dict[str, float | None])
        if "policy_sha256" in body:
            _check_weights(store, key, {step + 1: body["policy_sha256"]}, report)
