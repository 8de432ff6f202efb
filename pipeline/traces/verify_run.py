"""The part of `verify` that is not traces: inputs, policies, checkpoints, validations of a run."""

from collections.abc import Mapping
from typing import Any

from pipeline.store import Store, keys
from pipeline.store.commit import (
    CONTENT_SHA256,
    CorruptObjectError,
    DataFile,
    files_in,
    find_commit,
)
from pipeline.store.policy import policy_digest
from pipeline.traces.ids import check_ids, prompt_id, validation_id
from pipeline.traces.problems import Report
from pipeline.traces.reader import read_sample_file
from pipeline.traces.verify_files import verify_data


def verify_inputs(store: Store, run: Mapping[str, Any] | None, report: Report) -> None:
    """The staged files that run.json names. A record set has no run.json, and nothing to check."""
    key = keys.run_json()
    if run is None:
        if next(store.list(keys.attempts()), None) or next(store.list(keys.policies()), None):
            report.add(key, "no such object, but attempts or policies of a run are there")
        return
    with report.parsing(key):
        for file in staged_files(run):
            report.inputs += 1
            verify_data(store, file, report, key)


def staged_files(run: Mapping[str, Any]) -> list[DataFile]:
    """The staged inputs that run.json names. Raises KeyError, TypeError when it is not one."""
    inputs = run["inputs"]
    named = [inputs[name] for name in ("prompts", "val_prompts", "reward")]
    named += (inputs["model"] or {}).values()
    return files_in({"files": [body for body in named if body is not None]})


def verify_attempts(store: Store, report: Report) -> None:
    """The settings of each start say which it is, and how it ended why."""
    for info in store.list(keys.attempts()):
        with report.parsing(info.key):
            body = find_signed(store, info.key) or {}
            if info.key.endswith(".stop.json"):
                _ = body["reason"]
            elif info.key != keys.attempt(body["number"]):
                raise CorruptObjectError(f"{info.key}: of attempt {body['number']}")


def verify_policies(store: Store, report: Report) -> None:
    """Every policy version that is committed; those that the run has pruned do not exist."""
    for version, key, body in _committed(store, keys.policies(), "policy.json", report):
        with report.parsing(key):
            found, digest = body["version"], policy_digest(files_in(body))
            if (found, body["sha256"]) != (version, digest):
                raise CorruptObjectError(
                    f"{key}: version {found} with digest {body['sha256']}, expected version "
                    f"{version} and, of its files, {digest}"
                )
        report.policies += 1
        _verify_files(store, key, body, report)


def verify_checkpoints(store: Store, report: Report) -> None:
    """Every checkpoint that is committed."""
    for version, key, body in _committed(store, keys.checkpoints(), "checkpoint.json", report):
        with report.parsing(key):
            if body["version"] != version:
                raise CorruptObjectError(f"{key}: version {body['version']}, expected {version}")
            for file in files_in(body):
                if not file.key.startswith(key.rpartition("/")[0]):
                    raise CorruptObjectError(f"{key}: it names {file.key}, no file of its own")
        report.checkpoints += 1
        _verify_files(store, key, body, report)


def verify_validations(store: Store, report: Report) -> None:
    """Every validation: its plan, and of each committed shard the samples and their number."""
    plans: dict[int, Mapping[str, Any]] = {}
    found = _committed(store, keys.validations(), ".json", report)
    for version, key, body in found:
        if key == keys.validation_plan(version):
            with report.parsing(key):
                _shard_ids(body, version, 0)  # says what it must
                if (body["step"], body["policy_version"]) != (version, version):
                    raise CorruptObjectError(
                        f"{key}: of step {body['step']} and policy {body['policy_version']}, "
                        f"expected {version} and {version}"
                    )
                plans[version] = body
    for version, key, body in found:
        if key == keys.validation_plan(version):
            continue
        report.validations += 1
        before = len(report.problems)
        _verify_files(store, key, body, report)
        if len(report.problems) == before:
            with report.parsing(key):
                _verify_validation(store, version, key, body, plans.get(version))


def find_signed(store: Store, key: str) -> dict[str, Any] | None:
    """A commit's body, None if it is not there.

    Raises CorruptObjectError also when it lacks the digest of its own content.
    """
    body = find_commit(store, key)
    if body is not None and CONTENT_SHA256 not in body:
        raise CorruptObjectError(f"{key}: it has no {CONTENT_SHA256}; restore the object")
    return body


def _committed(
    store: Store, prefix: str, name: str, report: Report
) -> list[tuple[int, str, dict[str, Any]]]:
    """Version, key and body of the commit objects under a prefix whose name ends so."""
    found = []
    for info in store.list(prefix):
        version = keys.number_of(info.key)
        if version is not None and info.key.endswith(name):
            with report.noting(info.key):
                body = find_signed(store, info.key)
                if body is not None:  # None: pruned since it was listed
                    found.append((version, info.key, body))
    return found


def _verify_files(store: Store, key: str, body: Mapping[str, Any], report: Report) -> None:
    """The files of a commit object."""
    found = Report(report.uri, seen=report.seen)
    with found.parsing(key):
        for file in files_in(dict(body)):
            verify_data(store, file, found, key)
    # A running trainer prunes: the commit goes first, so files may go while they are read.
    if found.problems and store.size(key) is not None:
        report.problems += found.problems


def _verify_validation(
    store: Store, version: int, key: str, body: Mapping[str, Any], plan: Mapping[str, Any] | None
) -> None:
    if key != keys.validation(body["version"], body["shard"]):
        raise CorruptObjectError(f"{key}: of version {body['version']}, shard {body['shard']}")
    (file,) = files_in(dict(body))
    ids = [sample.id for sample in read_sample_file(store, file)]
    if len(ids) != body["count"] + body["masked"]:
        raise CorruptObjectError(
            f"{key}: {body['count']} samples and {body['masked']} without a reward, but {file.key} "
            f"has {len(ids)}"
        )
    if plan is not None:
        check_ids(key, ids, _shard_ids(plan, version, body["shard"]))


def _shard_ids(plan: Mapping[str, Any], version: int, shard: int) -> list[str]:
    """The ids of a shard's samples, by the validation's plan."""
    return [
        validation_id(version, prompt_id(prompt["row"], prompt["epoch"]), k)
        for i, prompt in enumerate(plan["prompts"])
        for k in range(plan["n"])
        if i % plan["shards"] == shard
    ]
