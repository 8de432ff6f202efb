"""The part of `verify` that checks inputs, attempts, checkpoints, validations and amendments."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.policies.weights import TensorReader
from pipeline.run import keys
from pipeline.run.amendments import Amendment, amended, parse_amendment, read_amendments
from pipeline.run.commit import CorruptObjectError, DataFile, files_in, find_commit
from pipeline.run.description import RunDescription, parse_description
from pipeline.run.parse import field, mapping, number, real, same
from pipeline.run.plan import Plan, parse_counts, parse_plan
from pipeline.run.restarts import attempt_count
from pipeline.run.uses import outdated_shards, outdated_text
from pipeline.store import Store, StoreError
from pipeline.traces.format.ids import check_ids, shard_ids
from pipeline.traces.format.types import Sample
from pipeline.traces.read.reader import read_sample_file
from pipeline.upkeep.problems import Report
from pipeline.upkeep.run_list import parse_limit, parse_stop, parse_total
from pipeline.upkeep.verify.contents import verify_data
from pipeline.upkeep.verify.samples_pass import StagedPrompts

_ROUNDING = 1e-9
"""Largest allowed difference between two sums of rewards, as a share of the sum of the rewards'
absolute values."""


def verify_inputs(store: Store, run: RunDescription | None, report: Report) -> None:
    """Check the staged files of a run.

    Args:
        store: The run or recorded set.
        run: The run's description; None for a recorded set, which must not contain staged files,
            attempts, amendments or policies.
        report: Receives problems and counts.
    """
    if run is None:
        for prefix in (keys.inputs(), keys.attempts(), keys.amendments(), keys.policies()):
            for info in store.list(prefix):
                report.add(keys.run_json(), f"no such object, but {info.key} exists")
                return
        return
    for key, files in staged_files(store, run, report):
        for file in files:
            report.inputs += 1
            verify_data(store, file, report, key)


def staged_files(
    store: Store, run: RunDescription, report: Report
) -> Iterator[tuple[str, list[DataFile]]]:
    """Find the staged files that run.json and each amendment name.

    If an amendment is damaged or missing, this is reported, and later amendments are not read.

    Args:
        store: The run.
        run: The run's original description.
        report: Receives problems.

    Yields:
        The key of run.json or of an amendment, and the staged files that the object names.
    """
    yield keys.run_json(), run.inputs.files()
    earlier: list[Amendment] = []
    for info in store.list(keys.amendments()):
        key = keys.amendment(len(earlier))
        found = None
        with report.noting(key):
            body = find_signed(store, key)
            if body is None or info.key != key:
                raise CorruptObjectError(f"{key}: no such object, but {info.key} exists")
            found = parse_amendment(body, earlier, store.uri)
            amended(run, [*earlier, found])
        if found is None:
            return
        yield key, found.files()
        earlier.append(found)


def verify_attempts(store: Store, report: Report) -> None:
    """Check each attempt's number and limits, and how each attempt ended.

    The numbers of the attempts must not have gaps.
    """
    infos = list(store.list(keys.attempts()))
    there = {info.key for info in infos}
    for earlier in map(keys.attempt, range(attempt_count(store))):
        if earlier not in there:
            report.add(earlier, f"no such object, but {max(there)} exists")
    for info in infos:
        with report.parsing(info.key):
            body = find_signed(store, info.key) or {}
            if info.key.endswith(".stop.json"):
                parse_stop(body)
            elif info.key != keys.attempt(body["number"]):
                raise CorruptObjectError(
                    f"{info.key}: number {body['number']}, expected the one in its key"
                )
            else:
                parse_total(body)
                parse_limit(body)


def verify_amended(store: Store, report: Report) -> None:
    """Check that each shard was generated with the inputs that amendments set for its step."""
    try:
        found = outdated_shards(store, read_amendments(store))
        for key, amendment in found:
            report.add(key, outdated_text(amendment))
    except StoreError:
        return  # the check of the damaged object reports the error


def _check_version(key: str, body: Mapping[str, Any], version: int) -> None:
    if not same(body["version"], version):
        raise CorruptObjectError(f"{key}: version {body['version']!r}, expected {version}")


def verify_checkpoints(store: Store, report: Report) -> None:
    """Check every committed checkpoint."""
    for version, key, body in committed(store, keys.checkpoints(), "checkpoint.json", report):
        with report.parsing(key):
            _check_version(key, body, version)
            if not same(body["step"], version):
                raise CorruptObjectError(f"{key}: step {body['step']!r}, expected {version}")
            mapping(body["layout"])
            for file in files_in(body):
                if not file.key.startswith(key.rpartition("/")[0]):
                    raise CorruptObjectError(f"{key}: it names {file.key}, which is not its own")
        report.checkpoints += 1
        verify_files(store, key, body, report)


def verify_validations(store: Store, prompts: StagedPrompts | None, report: Report) -> None:
    """Check every validation: its plan, and the samples of each committed shard.

    Args:
        store: The run or recorded set.
        prompts: The staged validation prompts; None if they are unknown.
        report: Receives problems.
    """
    plans: dict[int, Plan] = {}
    found = committed(store, keys.validations(), ".json", report)
    for version, key, body in found:
        if key == keys.validation_plan(version):
            with report.noting(key):
                plans[version] = parse_plan(body, key, store.uri)
    for version, key in {version: key for version, key, _ in found}.items():
        plan = keys.validation_plan(version)
        with report.noting(plan):
            if version not in plans and store.size(plan) is None:
                report.add(plan, f"no such object, but its samples exist: {key}")
    for version, key, body in found:
        if key == keys.validation_plan(version):
            continue
        report.validations += 1
        before = report.found
        verify_files(store, key, body, report)
        if report.found == before:
            with report.parsing(key):
                samples = _verify_validation(store, version, key, body, plans.get(version))
                _check_prompts(key, samples, prompts, report)


def _check_prompts(
    key: str, samples: Sequence[Sample], prompts: StagedPrompts | None, report: Report
) -> None:
    if prompts is None:
        return
    for sample in samples:
        with report.noting(key, sample.id):
            prompts.check(sample)


def find_signed(store: Store, key: str) -> dict[str, Any] | None:
    """Return a commit's body; None if it does not exist.

    Raises CorruptObjectError if the commit is damaged or its write id is not text.
    """
    body = find_commit(store, key)
    if body is not None and not isinstance(body.get("attempt", ""), str):
        raise CorruptObjectError(f"{key}: attempt {body['attempt']!r}, expected a write id")
    return body


def find_signed_description(store: Store) -> RunDescription | None:
    """Return a run's original description; None for a recorded set.

    Raises the same errors as `find_signed`.
    """
    body = find_signed(store, keys.run_json())
    return None if body is None else parse_description(body, store.uri)


def find_signed_plan(store: Store, key: str) -> Plan | None:
    """Return the plan under a key; None if it does not exist.

    Raises the same errors as `find_signed`.
    """
    body = find_signed(store, key)
    return None if body is None else parse_plan(body, key, store.uri)


def committed(
    store: Store, prefix: str, name: str, report: Report
) -> list[tuple[int, str, dict[str, Any]]]:
    """Read the commit objects under a prefix.

    Args:
        store: The run or recorded set.
        prefix: The prefix.
        name: The end of the commits' keys.
        report: Receives the problems with commits.

    Returns:
        The version, key and body of each readable commit.
    """
    found = []
    for info in store.list(prefix):
        version = keys.number_of(info.key)
        if version is not None and info.key.endswith(name):
            with report.noting(info.key):
                body = find_signed(store, info.key)
                if body is not None:  # None: removed since it was listed
                    found.append((version, info.key, body))
    return found


def verify_files(
    store: Store,
    key: str,
    body: Mapping[str, Any],
    report: Report,
    reader: TensorReader | None = None,
) -> bool:
    """Check the files and shares of a commit object.

    Args:
        store: The run.
        key: The commit's key.
        body: The commit's body.
        report: Receives problems.
        reader: Receives the tensors that it needs from the weights files.

    Returns:
        Whether all files and shares are correct.
    """
    found = Report(report.uri, seen=report.seen, weights=report.weights)
    with found.parsing(key):
        files = files_in(body) + (files_in(body, "tensors") if "tensors" in body else [])
        for file in files:
            verify_data(store, file, found, key, reader)
        _check_listed(store, key, [file.key for file in files])
    # A running trainer may have removed the object during the check, first its commit and then its
    # files.
    if found.problems and store.size(key) is not None:
        report.take(found)
    return not found.problems


def _check_listed(store: Store, key: str, named: Sequence[str]) -> None:
    """Check that a commit lists each file once, and lists all files that its writer wrote.

    All files of the writer have the same write id. Files with other write ids come from attempts
    that died or that were not the first to commit.
    """
    if not named or len(set(named)) != len(named):
        raise CorruptObjectError(
            f"{key}: its files are {list(named)}, expected at least one, each listed once"
        )
    makers = (keys.maker_of(name) for name in named)
    for made in sorted({maker for maker in makers if maker is not None}):
        for info in store.list(made):
            if keys.maker_of(info.key) == made and info.key not in named:
                raise CorruptObjectError(
                    f"{key}: it does not list {info.key}, which has the write id of its files"
                )


def _verify_validation(
    store: Store, version: int, key: str, body: Mapping[str, Any], plan: Plan | None
) -> list[Sample]:
    _check_version(key, body, version)
    shard = field(body, "shard", number)
    if key != keys.validation(version, shard):
        raise CorruptObjectError(
            f"{key}: shard {shard} of version {version}, expected the one in its key"
        )
    (file,) = files_in(body)
    samples = read_sample_file(store, file)
    _check_rewards(key, body, samples)
    if plan is not None:
        check_ids(key, [sample.id for sample in samples], shard_ids(plan, shard))
    return samples


def _check_rewards(key: str, body: Mapping[str, Any], samples: Sequence[Sample]) -> None:
    """Compare the counts and sums of a validation's shard with its samples."""
    said = parse_counts(body)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if (said.count, said.without_reward) != (len(rewards), len(samples) - len(rewards)):
        raise CorruptObjectError(
            f"{key}: {said.count} samples with a reward and {said.without_reward} without, but "
            f"its file has {len(rewards)} and {len(samples) - len(rewards)}"
        )
    sums = {"reward_sum": math.fsum(rewards)}
    if "reward_mean" in body and (rewards or body["reward_mean"] is not None):
        sums["reward_mean"] = sums["reward_sum"] / max(1, len(rewards))
    # The last digits of a sum depend on the order of addition.
    within = _ROUNDING * math.fsum(map(abs, rewards))
    for name, expected in sums.items():
        if abs(field(body, name, real) - expected) > within:
            raise CorruptObjectError(f"{key}: {name} {body[name]}, but its samples have {expected}")
    if "time_s" in body and field(body, "time_s", real) < 0:
        raise CorruptObjectError(f"{key}: time_s {body['time_s']}, expected at least 0")
