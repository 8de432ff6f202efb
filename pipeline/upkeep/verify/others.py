"""The part of `verify` that checks inputs, attempts, validations, policies and checkpoints."""

from collections.abc import Iterator
from typing import Any

from pipeline.policies.versions import check_base, parse_version
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, DataFile, files_in, find_commit, parsing
from pipeline.run.description import changed, read_created
from pipeline.run.plan import Plan, parse_counts, parse_plan
from pipeline.run.restarts import attempt_count
from pipeline.run.uses import OUTDATED, outdated_shards
from pipeline.store import Store
from pipeline.traces.format.ids import check_ids, shard_ids
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.reader import read_sample_file
from pipeline.upkeep.problems import Report
from pipeline.upkeep.run_list import parse_limit, parse_stop, parse_total
from pipeline.upkeep.verify.contents import verify_data

_SHARDS = (keys.steps(), keys.validations())


def staged_files(store: Store) -> Iterator[tuple[str, list[DataFile]]]:
    """Yield run.json and the attempts of a run, each with the staged files that the run then used.

    Raises CorruptObjectError for a damaged object.
    """
    run = read_created(store)
    yield keys.run_json(), run.inputs.files()
    for number in range(attempt_count(store)):
        body = find_commit(store, keys.attempt(number)) or {}
        with parsing(store, keys.attempt(number)):
            yield keys.attempt(number), changed(run, body.get("changes", {})).inputs.files()


def verify_inputs(store: Store, report: Report) -> None:
    """Check the staged files of a run, and that each shard was generated with them."""
    for key, files in staged_files(store):
        for file in files:
            report.inputs += key == keys.run_json()
            verify_data(store, file, report, key)
    shards = (info.key for prefix in _SHARDS for info in store.list(prefix))
    for key in outdated_shards(store, filter(keys.commits_shard, shards)):
        report.add(key, OUTDATED)


def verify_attempts(store: Store, report: Report) -> None:
    """Check each attempt's number and limits, and how each attempt ended."""
    there = {info.key for info in store.list(keys.attempts())}
    for earlier in map(keys.attempt, range(attempt_count(store))):
        if earlier not in there:
            report.add(earlier, f"no such object, but {max(there)} exists")
    for key in sorted(there):
        with report.parsing(key):
            body = find_commit(store, key) or {}
            if key.endswith(".stop.json"):
                parse_stop(body)
            elif key != keys.attempt(body["number"]):
                raise CorruptObjectError(
                    f"{key}: number {body['number']}, expected the one in its key"
                )
            else:
                parse_total(body)
                parse_limit(body)


def verify_validations(store: Store, report: Report) -> None:
    """Check every validation: its plan, and the samples of each committed shard."""
    plans: dict[int, Plan] = {}
    commits = list(_commits(store, keys.validations(), ".json", report))
    for version, key, body in commits:
        if key == keys.validation_plan(version):
            with report.noting(key):
                plans[version] = parse_plan(body, key, store.uri)
    for version, key, body in commits:
        if key == keys.validation_plan(version):
            continue
        report.validations += 1
        with report.parsing(key):
            if version not in plans:
                raise TraceError(f"{key}: its plan {keys.validation_plan(version)} is missing")
            shard = body["shard"]
            if key != keys.validation(body["version"], shard):
                raise CorruptObjectError(
                    f"{key}: shard {shard} of version {body['version']}, expected those in its key"
                )
            (file,) = files_in(body)
            if not verify_data(store, file, report, key):
                continue
            samples = read_sample_file(store, file)
            check_ids(key, [sample.id for sample in samples], shard_ids(plans[version], shard))
            said = parse_counts(body)
            rewards = sum(sample.reward is not None for sample in samples)
            if (said.count, said.without_reward) != (rewards, len(samples) - rewards):
                raise CorruptObjectError(
                    f"{key}: {said.count} samples with a reward and {said.without_reward} without, "
                    f"but its file has {rewards} and {len(samples) - rewards}"
                )


def verify_policies(store: Store, report: Report) -> None:
    """Check every committed policy version: its files, and the base of a difference."""
    for version, key, body in _commits(store, keys.policies(), "policy.json", report):
        report.policies += 1
        _verify_files(store, key, body, report)
        with report.parsing(key):
            policy = parse_version(body, version, store.uri)
            if policy.difference is None:
                continue
            base = keys.policy(policy.difference.base)
            found = find_commit(store, base)
            if found is not None:
                check_base(store, policy, parse_version(found, policy.difference.base, store.uri))
            elif store.size(key) is not None:  # retention has not removed both since
                report.add(base, f"no such object, but {key} is the difference from it")


def verify_checkpoints(store: Store, report: Report) -> None:
    """Check the files of every committed checkpoint."""
    for version, key, body in _commits(store, keys.checkpoints(), "checkpoint.json", report):
        report.checkpoints += 1
        with report.parsing(key):
            if (body["version"], body["step"]) != (version, version):
                raise CorruptObjectError(
                    f"{key}: version {body['version']!r} of step {body['step']!r}, expected "
                    f"{version} twice"
                )
        _verify_files(store, key, body, report)


def _commits(
    store: Store, prefix: str, name: str, report: Report
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the version, key and body of each readable commit under a prefix."""
    for info in store.list(prefix):
        version = keys.number_of(info.key)
        if version is not None and info.key.endswith(name):
            with report.noting(info.key):
                body = find_commit(store, info.key)
                if body is not None:  # None: removed since it was listed
                    yield version, info.key, body


def _verify_files(store: Store, key: str, body: dict[str, Any], report: Report) -> None:
    """Check the files and shares of a commit, unless retention removes the commit meanwhile."""
    found = Report(store.uri)
    with found.parsing(key):
        for file in (*files_in(body), *(files_in(body, "tensors") if "tensors" in body else ())):
            verify_data(store, file, found, key)
    if not found.problems or store.size(key) is not None:
        report.take(found)
