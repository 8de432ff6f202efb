"""The part of `verify` for the routes that a step's trainer recorded: its training set."""

from collections.abc import Iterator
from itertools import pairwise

from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from pipeline.run.description import RunDescription
from pipeline.store import ObjectMissingError, Store
from pipeline.traces.format.header import Header, read_header
from pipeline.traces.format.manifest import Manifest
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.joined import joined
from pipeline.traces.read.reader import read_slices
from pipeline.traces.read.training import (
    TrainingSet,
    find_training_set,
    listed_keys,
    place_of,
    recorded,
)
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.commits import check_commit
from pipeline.upkeep.verify.contents import verify_file
from pipeline.upkeep.verify.footer import check_footer
from pipeline.upkeep.verify.step_of_run import verify_weights

_SAMPLES_AT_ONCE = 256


def verify_training_files(store: Store, step: int, report: Report, pruned: bool) -> None:
    """Check every commit that a step's training set names, and its file, each for itself.

    What the set does not name is debris, and is not looked at.
    """
    for key, digest in _named(store, step, report):
        with report.noting(key):
            if store.size(key) is None:
                raise ObjectMissingError(
                    f"{key}: no such object; {keys.training_set(step)} names it"
                )
            header = read_header(store, key)
            if digest not in (None, header.sha256):
                report.add(
                    key, f"{keys.training_set(step)} names other content; restore the object"
                )
            check_commit(header, {"step": step}, {"routes": 1})
            (file,) = (file for file in header.files if file.role == "routes")
            if header.minor:  # the same write id is in both names
                expected = key.removesuffix(".json") + ".routes.parquet"
            else:
                expected = f"{key.removesuffix('.json')}.{header.body['attempt']}.routes.parquet"
            if file.data.key != expected:
                raise TraceError(f"{key}: it names {file.data.key}, expected {expected}")
            if pruned:
                continue
            before = len(report.problems)
            verify_file(store, file, report, key)
            if len(report.problems) == before:
                with report.noting(file.data.key):
                    check_footer(store, file, header)


def verify_training(
    store: Store, manifest: Manifest, run: RunDescription | None, report: Report, pruned: bool
) -> None:
    """Check that a step has the training set that its manifest asks for, and join the two.

    A step that is not trained yet need not have one. `run` is None if it is unknown.
    """
    step = manifest.step
    key, prefix = keys.training_set(step), keys.trainings(step)
    if manifest.format == "1.0":
        _verify_commits_1_0(store, step, report)
    if manifest.training and store.size(key) is None:
        for later in (keys.metrics(step), keys.policy(step + 1)):
            if store.size(later) is not None:
                report.add(key, f"no such object, but the step was trained: {later}")
                return
        return
    if any(problem.key == key or problem.key.startswith(prefix) for problem in report.problems):
        return
    with report.noting(key if manifest.training else prefix):
        training = find_training_set(store, manifest)
        if training is None:
            return
        if run is not None and run.geometry not in (None, training.geometry):
            raise TraceError(f"routes of {training.geometry}, the run's model has {run.geometry}")
        if run is not None:
            verify_weights(store, key, training.policies, report)
        with report.noting(key):
            _verify_names(store, step, training)
        if not pruned:
            made = joined(store, manifest, training)
            with report.noting(key):
                _verify_counts(made, training)
            _verify_rows(store, made, report)


def verify_recorded(manifest: Manifest, number: int, header: Header) -> None:
    """Compare the training commit of a recorded set's file with the manifest, sample by sample.

    `number` is the file's place in the manifest. Format 1.0 says nothing of samples. Raises
    TraceError.
    """
    place_of(header)
    said = recorded(header)
    if said is None:
        return
    manifest_key = keys.manifest(manifest.step)
    columns = ["id", "token_digest", "routes", "routes_digest", "part_digests"]
    for row in manifest.rows.select(columns).to_pylist():
        one = said.pop(row["id"], None)
        parts = row["routes"] or []
        at = next((i for i, part in enumerate(parts) if part["file"] == number), None)
        if one is None and (at is None or not parts[at]["segments"]):
            continue  # in another file, or of one token
        digests = row["part_digests"] or [row["routes_digest"]] * (len(parts) == 1)
        expected = digests[at] if at is not None and digests else None
        found = None if one is None else (one.token_digest, expected and one.routes_digest)
        if found != (row["token_digest"], expected):
            raise TraceError(
                f"{header.key}: sample {row['id']} has digests {found}, {manifest_key} has "
                f"{(row['token_digest'], expected)} of its tokens and routes"
            )
    if said:
        raise TraceError(f"{header.key}: sample {min(said)} is not in the step's manifest")


def _verify_commits_1_0(store: Store, step: int, report: Report) -> None:
    """Check that the routes recorded in a trained step of format 1.0 are committed."""
    there = {info.key for info in store.list(keys.step_prefix(step))}
    if keys.metrics(step) not in there or keys.training_set(step) in there:
        return
    for key in sorted(there):
        if key.startswith(keys.trainings(step)) and keys.maker_of(key) is not None:
            commit = key.split(".")[0] + ".json"
            if commit not in there:
                report.add(commit, f"no such object, but {key} is there")


def _named(store: Store, step: int, report: Report) -> Iterator[tuple[str, str | None]]:
    """Keys of a step's training commits, with digests of their content (not in format 1.0)."""
    key = keys.training_set(step)
    if store.size(key) is None:
        yield from ((listed, None) for listed in listed_keys(store, step))
        return
    with report.parsing(key):
        for commit in read_header(store, key).body["commits"]:
            if not keys.is_training(step, commit["key"]):
                raise CorruptObjectError(f"{key}: it names {commit['key']}")
            yield commit["key"], commit["commit_sha256"]


def _verify_names(store: Store, step: int, training: TrainingSet) -> None:
    """Check that the parts stand in order, each under the key of its place and the set's id."""
    if training.counts is None:
        return  # format 1.0
    header = read_header(store, keys.training_set(step))
    check_commit(header, {"step": step}, {})
    places = [place_of(part) for part in training.commits]
    if any(one >= two for one, two in pairwise(places)):
        raise TraceError(
            f"{header.key}: its commits are of stage, data-parallel and context-parallel rank "
            f"{places}, expected each once and ascending"
        )
    set_id = header.body["attempt"]
    for part, (stage, dp_rank, cp_rank) in zip(training.commits, places, strict=True):
        if part.body["attempt"] != set_id:
            raise TraceError(
                f"{part.key}: write id {part.body['attempt']}, the set that names it has {set_id}"
            )
        expected = keys.training(step, stage, dp_rank, set_id, cp_rank)
        if part.minor and part.key != expected:
            raise TraceError(f"{header.key}: it names {part.key}, expected {expected}")


def _verify_counts(made: Manifest, training: TrainingSet) -> None:
    """Compare the counts of training.json with its samples; format 1.0 has none."""
    if training.counts is None:
        return
    rows = made.rows.select(["rows_total", "rows_valid"]).to_pydict()
    found = {"samples": len(made.ids)} | {name: sum(column) for name, column in rows.items()}
    if training.counts != found:
        raise TraceError(f"counts {training.counts}, its commits have {found}")


def _verify_rows(store: Store, made: Manifest, report: Report) -> None:
    """Read every row, which compares the digest of every part."""
    for start in range(0, len(made.ids), _SAMPLES_AT_ONCE):
        ids = made.ids[start : start + _SAMPLES_AT_ONCE]
        with report.noting(keys.trainings(made.step)):
            slices = read_slices(store, made, ids)
            for id in ids:
                with report.noting(keys.trainings(made.step), id):
                    slices.routes(id)
