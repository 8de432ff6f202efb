"""The part of `verify` that checks one step: commits and their files, manifest and samples."""

import re
from collections.abc import Mapping, Sequence

import pyarrow.compute as pc

from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from pipeline.run.description import RunDescription
from pipeline.run.parse import same
from pipeline.store import Store
from pipeline.traces.format.chunks import read_footer
from pipeline.traces.format.header import Header
from pipeline.traces.format.manifest import Commits, Manifest, is_pruned, open_file, read_manifest
from pipeline.traces.format.policies import united
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.joined import check_part
from pipeline.upkeep.problems import Report
from pipeline.upkeep.prune import check_pruned, data_files
from pipeline.upkeep.verify.commits import check_commit, check_file_names
from pipeline.upkeep.verify.contents import verify_file
from pipeline.upkeep.verify.footer import check_footer, check_statistics
from pipeline.upkeep.verify.joined_rows import verify_rows
from pipeline.upkeep.verify.manifest_rows import ManifestRows
from pipeline.upkeep.verify.plans import find_plans, verify_groups, verify_plans
from pipeline.upkeep.verify.samples_pass import StagedPrompts
from pipeline.upkeep.verify.shards import Shard, check_shard_commit, verify_shard
from pipeline.upkeep.verify.step_of_run import verify_metrics, verify_step_of_run
from pipeline.upkeep.verify.stored_run import find_signed
from pipeline.upkeep.verify.training import (
    rows_by_file,
    verify_recorded,
    verify_training,
    verify_training_files,
)

_OLD = (
    "format 1.0 does not record which weights generated the samples, to which step and samples the "
    "trainer's files belong, or whether such files must exist: these cannot be checked"
)
_SHARD = re.compile(r"/rollout/\d{5}\.json$")


def verify_step(
    store: Store,
    step: int,
    run: RunDescription | None,
    prompts: StagedPrompts | None,
    report: Report,
) -> None:
    """Check the existing objects of a step. An unfinished step does not have a manifest yet.

    Args:
        store: The run or recorded set.
        step: The step.
        run: The run's description, as amended for the step; None for a recorded set or if the
            description is unreadable.
        prompts: The staged prompts of the run; None if they are unknown.
        report: Receives problems and counts.
    """
    before, found = len(report.problems), report.found
    pruned = False
    with report.noting(keys.pruned(step)):
        pruned = is_pruned(store, step)
    samples = _verify_objects(store, step, run, prompts, report, pruned)
    if not pruned and report.found > found and is_pruned(store, step):
        pruned = True  # it was pruned while it was being read, so missing files are expected
        del report.problems[before:]
        samples = _verify_objects(store, step, run, prompts, report, pruned)
    if samples is not None:
        report.steps += 1
        report.samples += samples
        report.pruned += pruned


def _verify_objects(
    store: Store,
    step: int,
    run: RunDescription | None,
    prompts: StagedPrompts | None,
    report: Report,
    pruned: bool,
) -> int | None:
    """Check a step's objects; return its number of samples (0 if unknown, None if not sealed)."""
    start = report.found
    plans = find_plans(store, step, run, report)
    _verify_mark(store, step, report)
    key = keys.manifest(step)
    sealed = True  # this also applies if the manifest's size cannot be read, which is reported
    with report.noting(key):
        sealed = store.size(key) is not None
    commits = Commits(store)
    manifest = _verify_manifest(store, step, commits, report) if sealed else None
    verify_metrics(store, step, manifest, report)
    shards = _verify_shards(store, step, commits, manifest, prompts, report, pruned=pruned)
    verify_training_files(store, step, report, pruned)
    if not sealed:
        return None
    if manifest is None:
        return 0
    before = len(report.problems)  # without repeats, which were found in single objects
    with report.noting(key):
        _verify_rows(manifest, run)
    if run is not None:
        verify_step_of_run(store, run, manifest, report)
    if plans:
        verify_plans(manifest, plans, report)
    headers = _verify_files(store, manifest, commits, shards, report, pruned)
    if manifest.format == "1.0" or any(header.minor == 0 for header in headers.values()):
        report.note(key, _OLD)
    if not pruned:
        body = commits.header(key).body
        ManifestRows(manifest, body.get("counts"), shards, headers, report).check()
    if len(report.problems) == before:
        if not pruned:
            _verify_joined(store, manifest, report)
        verify_training(store, manifest, run, report, pruned)
    if pruned and report.found == start:
        _verify_pruned(store, manifest, report)
    if run is not None and report.found == start:
        verify_groups(store, run, manifest, plans, report, pruned)
    return len(manifest.ids)


def _verify_mark(store: Store, step: int, report: Report) -> None:
    """Check that a step's pruned.json, if it exists, names the step and lists its data files."""
    key = keys.pruned(step)
    with report.noting(key):
        body = find_signed(store, key)
        if body is not None and not (same(body.get("step"), step) and "data" in body):
            raise CorruptObjectError(
                f"{key}: step {body.get('step')!r} with the fields {', '.join(body)}, expected "
                f"step {step} with the field data"
            )


def _verify_pruned(store: Store, manifest: Manifest, report: Report) -> None:
    """Check that pruned.json lists exactly the step's data files."""
    key = keys.pruned(manifest.step)
    with report.noting(key):
        body = find_signed(store, key)
        if body is not None:
            check_pruned(body, manifest.step, data_files(store, manifest.step))


def _verify_shards(
    store: Store,
    step: int,
    commits: Commits,
    manifest: Manifest | None,
    prompts: StagedPrompts | None,
    report: Report,
    *,
    pruned: bool,
) -> dict[str, Shard]:
    """Check the shards and their files; return the readable shards, keyed by commit key."""
    shards = {}
    infos = list(store.list(keys.step_prefix(step)))
    sealed = keys.manifest(step) in {info.key for info in infos}
    # A recorded set leaves out the engine's routes if the trainer recorded routes. Their files are
    # copied before the shards' commits.
    trainers = any("/training/" in info.key for info in infos)
    copying = trainers and not sealed and store.size(keys.run_json()) is None
    for info in infos:
        if _SHARD.search(info.key) is None:
            continue
        with report.noting(info.key):
            # The copies of a recorded set's objects are complete only once the step is sealed.
            if info.key.startswith(keys.replays(step)) and not sealed:
                continue
            header = commits.header(info.key)
            if pruned:
                check_shard_commit(header, step)
                continue
            refs = () if manifest is None else manifest.files
            named = {ref.sha256: ref.key for ref in refs if ref.commit == info.key}
            if copying:
                named = {f.data.sha256: f.data.key for f in header.files if f.role == "samples"}
            of_files = named if sealed or copying else None
            shards[info.key] = verify_shard(store, header, step, of_files, prompts, report)
    return shards


def _verify_manifest(store: Store, step: int, commits: Commits, report: Report) -> Manifest | None:
    """Check and read the manifest and the file of its rows; return None if either is damaged."""
    key = keys.manifest(step)
    before = report.found
    with report.noting(key):
        header = commits.header(key)
        check_commit(header, {"step": step}, {"manifest": 1})
        check_file_names(header)
        for file in header.files:
            verify_file(store, file, report, key)
    if report.found == before:
        with report.noting(key):
            check_footer(store, header.files[0], header)
            manifest = read_manifest(store, step)
            footer = read_footer(store, header.files[0])
            first = 0
            for group, described in enumerate(header.files[0].row_groups):
                rows = manifest.rows.slice(first, described.rows)
                check_statistics(footer, header.files[0], group, rows)
                first += described.rows
            return manifest
    return None


def _verify_rows(manifest: Manifest, run: RunDescription | None) -> None:
    """Compare the manifest's columns with each other, and its geometry with the run's model."""
    if manifest.geometry is not None and run is not None and run.geometry != manifest.geometry:
        raise TraceError(f"made for {manifest.geometry}, but the run's model has {run.geometry}")
    rows = manifest.rows
    tokens = pc.add(rows["prompt_length"], rows["response_length"])
    wrong = pc.not_equal(rows["rows_total"], pc.subtract(tokens, 1))
    for row in rows.filter(wrong).slice(0, 1).to_pylist():
        raise TraceError(
            f"sample {row['id']}: {row['rows_total']} rows for {row['prompt_length']} prompt "
            f"and {row['response_length']} response tokens"
        )
    without = pc.is_null(rows["routes"])
    if manifest.geometry is not None and manifest.provenance is not None:
        no_parts = pc.equal(pc.list_value_length(rows["routes"]), 0)
        if manifest.provenance.kind == "R2":  # a sample of one token may be in no file
            no_parts = pc.and_(no_parts, pc.greater(rows["rows_total"], 0))
        without = pc.or_kleene(without, no_parts)
    differs = without if manifest.geometry is not None else pc.invert(without)
    for row in rows.filter(differs).slice(0, 1).to_pylist():
        raise TraceError(f"sample {row['id']}: it has no routes, but other samples do")


def _verify_files(
    store: Store,
    manifest: Manifest,
    commits: Commits,
    shards: Mapping[str, Shard],
    report: Report,
    pruned: bool,
) -> dict[str, Header]:
    """Compare the manifest's list of files with the commits; return the readable commits by key.

    Files that do not belong to the step's shards (in a recorded set, a trainer's files) are read
    here.
    """
    headers = {}
    of_set = any("/training/" in ref.commit for ref in manifest.files)
    rows = rows_by_file(manifest) if of_set else {}
    for number, ref in enumerate(manifest.files):
        with report.noting(ref.commit):
            file, _ = open_file(store, manifest, number, commits)
            headers[ref.commit] = header = commits.header(ref.commit)
            folder = keys.step_prefix(manifest.step)
            if outside := [key for key in (ref.key, ref.commit) if not key.startswith(folder)]:
                raise TraceError(
                    f"{keys.manifest(manifest.step)}: it names {outside[0]}, expected objects in "
                    f"{folder}"
                )
            if "/training/" in ref.commit:
                verify_recorded(manifest, rows.get(number, ()), number, header)
                if not pruned:
                    check_part(store, header, file)
            if not pruned and ref.commit not in shards and not _SHARD.search(ref.commit):
                verify_file(store, file, report, ref.commit)
                with report.noting(ref.key):
                    check_footer(store, file, header)
    with report.noting(keys.manifest(manifest.step)):
        _check_alike([header for key, header in headers.items() if "/training/" in key])
    return headers


def _check_alike(parts: Sequence[Header]) -> None:
    """Raise TraceError unless a recorded set's training commits belong to the same training set."""
    for part in parts:
        found, expected = (of.body.get("manifest_sha256") for of in (part, parts[0]))
        if found != expected:
            raise TraceError(
                f"{part.key}: recorded for a manifest with content {str(found)[:16]}..., expected "
                f"{str(expected)[:16]}... as in {parts[0].key}"
            )
    united((part.key, part.policies) for part in parts)


def _verify_joined(store: Store, manifest: Manifest, report: Report) -> None:
    """Check the routes that are not in their samples' shard, because a trainer recorded them."""
    commits = [ref.commit for ref in manifest.files]
    by_files: dict[tuple[int, ...], list[str]] = {}
    for row in manifest.rows.select(["id", "samples", "routes"]).to_pylist():
        if row["routes"] is None:
            continue
        numbers = tuple(part["file"] for part in row["routes"])
        if {commits[number] for number in numbers} != {commits[row["samples"]["file"]]}:
            by_files.setdefault(numbers, []).append(row["id"])
    for numbers, of_files in by_files.items():
        key = manifest.files[numbers[0]].key if numbers else keys.manifest(manifest.step)
        for ids in manifest.id_batches(of_files):
            verify_rows(store, manifest, ids, key, report)
