"""The part of `verify` that checks a step's training set: the routes that its trainer recorded."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipeline.errors import cut
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from pipeline.run.description import RunDescription
from pipeline.store import ObjectMissingError, Store
from pipeline.traces.format.chunks import TraceFile
from pipeline.traces.format.header import Header, read_header
from pipeline.traces.format.manifest import Manifest
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.joined import joined
from pipeline.traces.read.training import (
    TrainingSet,
    find_training_set,
    listed_keys,
    named_commits,
    place_of,
    recorded,
)
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.commits import check_commit, first_key
from pipeline.upkeep.verify.contents import verify_file
from pipeline.upkeep.verify.footer import check_footer
from pipeline.upkeep.verify.joined_rows import verify_rows
from pipeline.upkeep.verify.step_of_run import verify_weights

_DIGEST = re.compile(r"[0-9a-f]{64}")
_COMPARED = [
    *("id", "token_digest", "routes", "routes_digest", "part_digests", "rows_total", "rows_valid"),
]
"""Columns of the manifest that are compared with the training commits of a recorded set."""


def verify_training_files(store: Store, step: int, report: Report, pruned: bool) -> None:
    """Check each commit that a step's training set names, together with the commit's files.

    Objects that the set does not name are debris and are not checked.

    Args:
        store: The run or recorded set.
        step: The step.
        report: Receives problems.
        pruned: Whether the step was pruned, so that the files are gone.
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
                    key, f"{keys.training_set(step)} records other content; restore the object"
                )
            file = _checked_part(header, step)
            if pruned:
                continue
            before = report.found
            verify_file(store, file, report, key)
            if report.found == before:
                with report.noting(file.data.key):
                    check_footer(store, file, header)


def verify_training(
    store: Store, manifest: Manifest, run: RunDescription | None, report: Report, pruned: bool
) -> None:
    """Check that a step has the required training set, and that it can be joined with the manifest.

    A step that is not trained yet does not need a training set.

    Args:
        store: The run or recorded set.
        manifest: The manifest of the step.
        run: The run's description; None if it is unknown.
        report: Receives problems.
        pruned: Whether the step was pruned, so that the files are gone.
    """
    step = manifest.step
    key, prefix = keys.training_set(step), keys.trainings(step)
    if manifest.format == "1.0":
        _verify_commits_1_0(store, step, report)
    if manifest.training and store.size(key) is None:
        for later in (keys.metrics(step), keys.policy(step + 1)):
            # The step may have been trained between the requests.
            if store.size(later) is not None and store.size(key) is None:
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
            raise TraceError(
                f"routes for {training.geometry}, but the run's model has {run.geometry}"
            )
        if run is not None:
            verify_weights(store, key, training.policies, report)
        with report.noting(key):
            _verify_names(store, step, training)
        if not pruned:
            made = joined(store, manifest, training)
            with report.noting(key):
                _verify_counts(made, training)
            _verify_rows(store, made, report)


def rows_by_file(manifest: Manifest) -> dict[int, list[dict[str, Any]]]:
    """Return the manifest's rows for `verify_recorded`, keyed by the files with their routes."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in manifest.rows.select(_COMPARED).to_pylist():
        for number in {part["file"] for part in row["routes"] or ()}:
            found.setdefault(number, []).append(row)
    return found


def verify_recorded(
    manifest: Manifest, rows: Sequence[Mapping[str, Any]], number: int, header: Header
) -> None:
    """Compare the training commit of a recorded set's file with the manifest, sample by sample.

    Commits of format 1.0 do not list samples, so only their place is checked.

    Args:
        manifest: The manifest of the step.
        rows: The rows whose routes are in the file, from `rows_by_file`.
        number: The file's index in the manifest.
        header: The training commit.

    Raises:
        TraceError: The commit's samples or digests are incorrect.
    """
    _verify_place(header, manifest.step)
    said = recorded(header)
    if said is None:
        return
    manifest_key = keys.manifest(manifest.step)
    others = said.keys() - {row["id"] for row in rows}
    listed = manifest.select(sorted(others & manifest.numbers.keys()))
    for row in [*rows, *listed.select(_COMPARED).to_pylist()]:
        one = said.pop(row["id"], None)
        parts = row["routes"] or []
        at = next((i for i, part in enumerate(parts) if part["file"] == number), None)
        if one is None and (at is None or not parts[at]["segments"]):
            continue  # its routes are in a different file, or it has only one token
        digests = row["part_digests"] or [row["routes_digest"]] * (len(parts) == 1)
        if digests and len(digests) != len(parts):
            raise TraceError(
                f"{manifest_key}: sample {row['id']}: {len(digests)} part_digests, expected "
                f"{len(parts)}: one per part"
            )
        expected = digests[at] if at is not None and digests else None
        found = None if one is None else (one.token_digest, expected and one.routes_digest)
        if found != (row["token_digest"], expected):
            raise TraceError(
                f"{header.key}: sample {row['id']} has digests {found} for its tokens and routes, "
                f"but {manifest_key} has {(row['token_digest'], expected)}"
            )
        held = 0 if at is None else sum(segment["tokens"] for segment in parts[at]["segments"])
        valid = row["rows_valid"] if held == row["rows_total"] else None
        if one is not None and (one.rows, one.rows_valid) != (
            held,
            one.rows_valid if valid is None else valid,
        ):
            raise TraceError(
                f"{header.key}: sample {row['id']} has {one.rows} rows, {one.rows_valid} of them "
                f"valid; {manifest_key} has {held}, {'unknown' if valid is None else valid} of "
                "them valid; restore the object"
            )
    if said:
        raise TraceError(f"{header.key}: sample {min(said)} is not in the step's manifest")


def _verify_place(header: Header, step: int) -> None:
    """Compare the training commit of a recorded set's file with the commit's key.

    In a recorded set, no training.json names the commit.
    """
    place = stage, dp_rank, cp_rank = place_of(header)
    _checked_part(header, step)
    attempt, sealed = header.body["attempt"], header.body.get("manifest_sha256")
    if header.minor:
        expected = keys.training(step, stage, dp_rank, attempt, cp_rank)
    else:
        expected = keys.training_1_0(step, stage, dp_rank)
    if first_key(header.key) != expected:
        raise TraceError(
            f"{header.key}: stage, data-parallel and context-parallel rank {place} and write id "
            f"{attempt}, expected the ones in its key; restore the object"
        )
    if header.minor and not _DIGEST.fullmatch(str(sealed)):
        raise TraceError(
            f"{header.key}: manifest_sha256 {cut(sealed)}, expected 64 hexadecimal digits; "
            "restore the object"
        )


def _checked_part(header: Header, step: int) -> TraceFile:
    """Return the routes file of a training commit.

    Raises TraceError if the commit is invalid or the file is not named after it.
    """
    check_commit(header, {"step": step}, {"routes": 1})
    (file,) = (file for file in header.files if file.role == "routes")
    stem = first_key(header.key).removesuffix(".json")
    if not header.minor:  # in format 1.1, the commit's key contains the write id
        stem += f".{header.body['attempt']}"
    if file.data.key != f"{stem}.routes.parquet":
        raise TraceError(f"{header.key}: it names {file.data.key}, expected {stem}.routes.parquet")
    return file


def _verify_commits_1_0(store: Store, step: int, report: Report) -> None:
    """Check that the routes recorded in a trained step of format 1.0 are committed."""
    there = {info.key for info in store.list(keys.step_prefix(step))}
    if keys.metrics(step) not in there or keys.training_set(step) in there:
        return
    for key in sorted(there):
        if key.startswith(keys.trainings(step)) and keys.maker_of(key) is not None:
            commit = key.split(".")[0] + ".json"
            if commit not in there:
                report.add(commit, f"no such object, but {key} exists")


def _named(store: Store, step: int, report: Report) -> Iterator[tuple[str, str | None]]:
    """Yield the keys of a step's training commits, with their digests (None in format 1.0)."""
    key = keys.training_set(step)
    if store.size(key) is None:
        yield from ((listed, None) for listed in listed_keys(store, step))
        return
    with report.noting(key):
        for part, digest in named_commits(read_header(store, key)):
            if not keys.is_training(step, part):
                raise CorruptObjectError(f"{key}: it names {part}")
            yield part, digest


def _verify_names(store: Store, step: int, training: TrainingSet) -> None:
    """Check the order of a training set's commits, and their keys.

    Each key must contain the commit's place and the set's write id.
    """
    if training.counts is None:
        return  # format 1.0
    header = read_header(store, keys.training_set(step))
    check_commit(header, {"step": step}, {})
    places = [place_of(part) for part in training.commits]
    if any(one >= two for one, two in pairwise(places)):
        raise TraceError(
            f"{header.key}: its commits have stages, data-parallel and context-parallel ranks "
            f"{places}, expected each once and ascending"
        )
    set_id = header.body["attempt"]
    for part, (stage, dp_rank, cp_rank) in zip(training.commits, places, strict=True):
        if part.body["attempt"] != set_id:
            raise TraceError(
                f"{part.key}: write id {part.body['attempt']}, but the set that names it has "
                f"{set_id}"
            )
        expected = keys.training(step, stage, dp_rank, set_id, cp_rank)
        if part.minor and part.key != expected:
            raise TraceError(f"{header.key}: it names {part.key}, expected {expected}")


def _verify_counts(made: Manifest, training: TrainingSet) -> None:
    """Compare the counts in training.json with the set's samples. Format 1.0 has no counts."""
    if training.counts is None:
        return
    rows = made.rows.select(["rows_total", "rows_valid"]).to_pydict()
    found = {"samples": len(made.ids)} | {name: sum(column) for name, column in rows.items()}
    if training.counts != found:
        raise TraceError(f"counts {training.counts}, but its commits have {found}")


def _verify_rows(store: Store, made: Manifest, report: Report) -> None:
    """Read every row, which also compares the digest of every part."""
    for ids in made.id_batches():
        verify_rows(store, made, ids, keys.trainings(made.step), report)
