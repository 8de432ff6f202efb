"""The part of `verify` beside traces: inputs, attempts, policies, checkpoints and validations."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.run import keys
from pipeline.run.amendments import Amendment, amended, parse_amendment, read_amendments
from pipeline.run.commit import CONTENT_SHA256, CorruptObjectError, DataFile, files_in, find_commit
from pipeline.run.description import RunDescription, parse_description
from pipeline.run.parse import field, mapping, number, real, same
from pipeline.run.plan import Plan, parse_counts, parse_plan
from pipeline.run.policy import WEIGHTS, policy_digest, stored_digest
from pipeline.run.uses import outdated_shards, outdated_text
from pipeline.run.weights import SUFFIX, weights_digest
from pipeline.store import Store, StoreError
from pipeline.traces.format.ids import check_ids, shard_ids
from pipeline.traces.format.types import Sample
from pipeline.traces.read.reader import read_sample_file
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.contents import verify_data

_ROUNDING = 1e-9
"""Of the sum of absolute rewards: how far a sum of them may be from another."""


def verify_inputs(store: Store, run: RunDescription | None, report: Report) -> None:
    """Check the staged files of a run. A recorded set (`run` is None) must have none."""
    if run is None:
        for prefix in (keys.attempts(), keys.amendments(), keys.policies()):
            for info in store.list(prefix):
                report.add(keys.run_json(), f"no such object, but {info.key} is there")
                return
        return
    for key, files in staged_files(store, run, report):
        for file in files:
            report.inputs += 1
            verify_data(store, file, report, key)


def staged_files(
    store: Store, run: RunDescription, report: Report
) -> Iterator[tuple[str, list[DataFile]]]:
    """Yield the staged files of run.json and of each amendment, with that object's key.

    A broken or missing amendment is reported, and those after it are not read.
    """
    yield keys.run_json(), run.inputs.files()
    earlier: list[Amendment] = []
    for info in store.list(keys.amendments()):
        key = keys.amendment(len(earlier))
        found = None
        with report.noting(key):
            body = find_signed(store, key)
            if body is None or info.key != key:
                raise CorruptObjectError(f"{key}: no such object, but {info.key} is there")
            found = parse_amendment(body, earlier, store.uri)
            amended(run, [*earlier, found])
        if found is None:
            return
        yield key, found.files()
        earlier.append(found)


def verify_attempts(store: Store, report: Report) -> None:
    """Check that each attempt holds its own number, and each stop object a reason."""
    for info in store.list(keys.attempts()):
        with report.parsing(info.key):
            body = find_signed(store, info.key) or {}
            if info.key.endswith(".stop.json"):
                _ = body["reason"]
            elif info.key != keys.attempt(body["number"]):
                raise CorruptObjectError(f"{info.key}: of attempt {body['number']}")


def verify_amended(store: Store, report: Report) -> None:
    """Check that each shard was made with the inputs that the amendments give its step."""
    try:
        found = outdated_shards(store, read_amendments(store))
        for key, amendment in found:
            report.add(key, outdated_text(amendment))
    except StoreError:
        return  # the broken object is in the report already, by its own check


def verify_policies(store: Store, report: Report) -> None:
    """Check every committed policy version; expired ones do not exist."""
    for version, key, body in _committed(store, keys.policies(), "policy.json", report):
        with report.parsing(key):
            _check_version(key, body, version)
        report.policies += 1
        _verify_files(store, key, body, report)
        with report.parsing(key):
            _verify_weights(key, body, report)


def _check_version(key: str, body: Mapping[str, Any], version: int) -> None:
    if not same(body["version"], version):
        raise CorruptObjectError(f"{key}: version {body['version']!r}, expected {version}")


def _verify_weights(key: str, body: Mapping[str, Any], report: Report) -> None:
    """Compare the digest of a policy, whose files were read, with them."""
    files = files_in(dict(body))
    if WEIGHTS not in body:  # made before policies had a digest of their weights
        expected = policy_digest(files)
    else:
        of_weights = [file.key for file in files if file.key.endswith(SUFFIX)]
        for name in of_weights:
            if name not in report.weights:
                if not any(problem.key == name for problem in report.problems):
                    raise CorruptObjectError(f"{key}: {name} is no whole safetensors file")
                return  # the bad file is in the report already
        expected = weights_digest(report.weights[name] for name in of_weights)
    if stored_digest(body) != expected:
        raise CorruptObjectError(
            f"{key}: digest {stored_digest(body)}, but of its weights it is {expected}; restore "
            "the object"
        )


def verify_checkpoints(store: Store, report: Report) -> None:
    """Check every committed checkpoint."""
    for version, key, body in _committed(store, keys.checkpoints(), "checkpoint.json", report):
        with report.parsing(key):
            _check_version(key, body, version)
            if not same(body["step"], version):
                raise CorruptObjectError(f"{key}: step {body['step']!r}, expected {version}")
            mapping(body["layout"])
            for file in files_in(body):
                if not file.key.startswith(key.rpartition("/")[0]):
                    raise CorruptObjectError(f"{key}: it names {file.key}, no file of its own")
        report.checkpoints += 1
        _verify_files(store, key, body, report)


def verify_validations(store: Store, report: Report) -> None:
    """Check every validation: its plan, and the samples of each committed shard."""
    plans: dict[int, Plan] = {}
    found = _committed(store, keys.validations(), ".json", report)
    for version, key, body in found:
        if key == keys.validation_plan(version):
            with report.noting(key):
                plans[version] = parse_plan(body, key, store.uri)
    for version, key in {version: key for version, key, _ in found}.items():
        plan = keys.validation_plan(version)
        with report.noting(plan):
            if version not in plans and store.size(plan) is None:
                report.add(plan, f"no such object, but its samples are there: {key}")
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
    """Read a commit's body; None if it does not exist.

    Raises CorruptObjectError, also when the commit lacks the digest of its own content.
    """
    body = find_commit(store, key)
    if body is not None and CONTENT_SHA256 not in body:
        raise CorruptObjectError(f"{key}: it has no {CONTENT_SHA256}; restore the object")
    if body is not None and not isinstance(body.get("attempt", ""), str):
        raise CorruptObjectError(f"{key}: attempt {body['attempt']!r}, expected a write id")
    return body


def find_signed_description(store: Store) -> RunDescription | None:
    """Read a run's original description; None for a recorded set. Raises like `find_signed`."""
    body = find_signed(store, keys.run_json())
    return None if body is None else parse_description(body, store.uri)


def find_signed_plan(store: Store, key: str) -> Plan | None:
    """Read the plan under a key; None if it does not exist. Raises like `find_signed`."""
    body = find_signed(store, key)
    return None if body is None else parse_plan(body, key, store.uri)


def _committed(
    store: Store, prefix: str, name: str, report: Report
) -> list[tuple[int, str, dict[str, Any]]]:
    """Version, key and body of the commit objects under a prefix whose keys end with `name`."""
    found = []
    for info in store.list(prefix):
        version = keys.number_of(info.key)
        if version is not None and info.key.endswith(name):
            with report.noting(info.key):
                body = find_signed(store, info.key)
                if body is not None:  # None: removed since it was listed
                    found.append((version, info.key, body))
    return found


def _verify_files(store: Store, key: str, body: Mapping[str, Any], report: Report) -> None:
    """Check the files of a commit object."""
    found = Report(report.uri, seen=report.seen, weights=report.weights)
    with found.parsing(key):
        files = files_in(dict(body))
        for file in files:
            verify_data(store, file, found, key)
        _check_listed(store, key, [file.key for file in files])
    # A running trainer may remove the object meanwhile: first its commit, then its files.
    if found.problems and store.size(key) is not None:
        report.problems += found.problems


def _check_listed(store: Store, key: str, named: Sequence[str]) -> None:
    """Check that a commit lists each file once, and all that its maker wrote with their write id.

    Other write ids are of attempts that died, or came second.
    """
    if not named or len(set(named)) != len(named):
        raise CorruptObjectError(f"{key}: its files are {list(named)}, expected some, each once")
    makers = (keys.maker_of(name) for name in named)
    for made in sorted({maker for maker in makers if maker is not None}):
        for info in store.list(made):
            if keys.maker_of(info.key) == made and info.key not in named:
                raise CorruptObjectError(
                    f"{key}: it does not list {info.key}, whose maker wrote what it lists"
                )


def _verify_validation(
    store: Store, version: int, key: str, body: Mapping[str, Any], plan: Plan | None
) -> None:
    _check_version(key, body, version)
    shard = field(body, "shard", number)
    if key != keys.validation(version, shard):
        raise CorruptObjectError(f"{key}: of version {version}, shard {shard}")
    (file,) = files_in(dict(body))
    samples = read_sample_file(store, file)
    _check_rewards(key, body, samples)
    if plan is not None:
        check_ids(key, [sample.id for sample in samples], shard_ids(plan, shard))


def _check_rewards(key: str, body: Mapping[str, Any], samples: Sequence[Sample]) -> None:
    """Compare the counts and sums of a validation's shard with its samples."""
    said = parse_counts(body)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if (said.count, said.without_reward) != (len(rewards), len(samples) - len(rewards)):
        raise CorruptObjectError(
            f"{key}: {said.count} samples with a reward and {said.without_reward} without, its "
            f"file has {len(rewards)} and {len(samples) - len(rewards)}"
        )
    sums = {"reward_sum": math.fsum(rewards)}
    if "reward_mean" in body and (rewards or body["reward_mean"] is not None):
        sums["reward_mean"] = sums["reward_sum"] / max(1, len(rewards))
    # Sums depend on the order, in their last digits.
    within = _ROUNDING * math.fsum(map(abs, rewards))
    for name, expected in sums.items():
        if abs(field(body, name, real) - expected) > within:
            raise CorruptObjectError(f"{key}: {name} {body[name]}, of its samples it is {expected}")
    if "time_s" in body and field(body, "time_s", real) < 0:
        raise CorruptObjectError(f"{key}: it took {body['time_s']} s")
