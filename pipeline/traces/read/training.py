"""Reading the training set of a step: the routes that the trainer recorded (R2)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import cut
from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from pipeline.run.parse import field, items, key, listed, mapping, number, same, text
from pipeline.store import Store
from pipeline.traces.format.chunks import TraceFile
from pipeline.traces.format.header import Header, read_header, source
from pipeline.traces.format.manifest import Manifest, file_of
from pipeline.traces.format.policies import policies_text, united
from pipeline.traces.format.types import Provenance, TraceError

_COUNTS = ("samples", "rows_total", "rows_valid")
_COMMIT_1_0 = re.compile(r"\d{3}-\d{5}\.json")


@dataclass(frozen=True)
class TrainingSet:
    """The commits that contain the routes recorded by a step's trainer."""

    name: str
    """The place of the set: training.json or, in format 1.0, the folder of its commits."""
    geometry: Geometry
    """Geometry with all layers of the set."""
    provenance: Provenance
    commits: tuple[Header, ...]
    policies: Mapping[int, str] | None = None
    """Weights digests, keyed by policy version; None if unknown (always in format 1.0)."""
    counts: Mapping[str, int] | None = None
    """The counts `samples`, `rows_total` and `rows_valid` in training.json; None in format 1.0,
    which does not record counts."""

    def check(self) -> None:
        """Raise TraceError unless the commits are consistent with the set and with each other."""
        if self.provenance.kind != "R2":
            raise TraceError(f"{self.name}: routes of kind {self.provenance.kind}, expected R2")
        if not self.commits:
            raise TraceError(f"{self.name}: no commits")
        for header in self.commits:
            found, made = geometry_of(header), _made(header)
            if (found.experts, found.topk) != (self.geometry.experts, self.geometry.topk):
                raise TraceError(
                    f"{header.key}: {found}, expected {self.geometry} as in {self.name}"
                )
            ours, theirs = source(made), source(self.provenance)
            if ours != theirs:
                raise TraceError(
                    f"{header.key}: its routes have {ours}, expected {theirs} as in {self.name}"
                )
        layers = sorted({layer for header in self.commits for layer in geometry_of(header).layers})
        if layers != list(self.geometry.layers):
            raise TraceError(
                f"{self.name}: its commits have routes for layers {layers}, expected "
                f"{list(self.geometry.layers)}"
            )
        engines = sorted({_made(header).engine for header in self.commits})
        if self.provenance.engine not in engines:
            raise TraceError(
                f"{self.name}: its engine is {self.provenance.engine}, but its commits have "
                f"{', '.join(engines)}; remake the object"
            )
        named = [(header.key, header.policies) for header in self.commits]
        united([(self.name, self.policies), *named])
        if self.policies != (whole := united(named)):
            raise TraceError(
                f"{self.name}: policies {policies_text(self.policies)}, but its commits have "
                f"{policies_text(whole)}; remake the object"
            )


@dataclass(frozen=True)
class Recorded:
    """A training commit's entry for one sample; commits of format 1.0 have no entries."""

    token_digest: str
    routes_digest: str
    """Digest of the sample's routes, over the layers and rows that the commit's file contains."""
    rows: int
    rows_valid: int


def find_training_set(store: Store, manifest: Manifest) -> TrainingSet | None:
    """Return a sealed step's training set; None if the trainer does not record the step's routes.

    The manifest's rows are not needed. Raises TraceError if the set is missing or belongs to a
    different step, ObjectMissingError if one of its commits is missing, and CorruptObjectError if
    an object is damaged.
    """
    there = store.size(keys.training_set(manifest.step)) is not None
    if manifest.format == "1.0" and not there:
        return _listed(store, manifest.step)
    if there:
        return read_training_set(store, manifest)
    if not manifest.training:
        return None
    raise TraceError(
        f"{keys.training_set(manifest.step)} in {store.uri}: no such object, but according to "
        f"{keys.manifest(manifest.step)} the trainer records this step's routes: they "
        "are not recorded yet, or were removed; wait until the step is trained, or restore the "
        "object"
    )


def read_training_set(store: Store, manifest: Manifest) -> TrainingSet:
    """Read training.json and the commits that it lists.

    Raises the same errors as `find_training_set`.
    """
    header = read_header(store, keys.training_set(manifest.step))
    name = f"{header.key} in {store.uri}"
    _refuse_1_0(header, name)
    if manifest.format != "1.0" and not manifest.training:
        raise TraceError(
            f"{name}: exists, but according to {keys.manifest(manifest.step)} the trainer "
            "records no routes; remove it, or restore the manifest"
        )
    named = named_commits(header)
    try:
        counts = field(
            header.body, "counts", lambda of: {n: field(mapping(of), n, number) for n in _COUNTS}
        )
    except ValueError as error:
        raise TraceError(f"{name}: {error}; remake the object") from error
    if header.geometry is None or header.provenance is None or not named:
        raise TraceError(
            f"{name}: geometry {header.geometry or 'null'}, provenance "
            f"{header.provenance or 'null'} and {len(named)} commits, expected all three"
        )
    _check_step(header, manifest, name)
    commits = tuple(_commit(store, manifest, *commit) for commit in named)
    found = TrainingSet(name, header.geometry, header.provenance, commits, header.policies, counts)
    found.check()
    return found


def named_commits(header: Header) -> list[tuple[str, str]]:
    """Return the keys and digests of the commits in a training.json.

    Raises TraceError if its list is malformed.
    """
    try:
        return field(header.body, "commits", listed(_named_commit))
    except ValueError as error:
        raise TraceError(f"{header.key}: {error}; remake the object") from error


def _named_commit(value: Any) -> tuple[str, str]:
    body = mapping(value)
    return field(body, "key", key), field(body, "commit_sha256", text)


def read_training_commit(store: Store, manifest: Manifest, key: str) -> Header:
    """Read one commit of a training set.

    Args:
        store: The store that contains the step.
        manifest: The sealed step.
        key: Key of the commit.

    Raises:
        ObjectMissingError: The commit is missing.
        CorruptObjectError: The commit is damaged.
        TraceError: The commit is malformed or belongs to a different step.
    """
    header = read_header(store, key)
    name = f"{key} in {store.uri}"
    _check_step(header, manifest, name)
    place_of(header)
    recorded(header)
    routes_file(header)
    return header


def routes_file(header: Header) -> TraceFile:
    """Return the routes file of a training commit. Raises TraceError if the commit lists none."""
    file = file_of(header, "routes")
    if file is None:
        raise TraceError(f"{header.key}: no routes file in this commit")
    return file


def listed_keys(store: Store, step: int) -> list[str]:
    """Return the keys of a step's training commits in format 1.0."""
    prefix = keys.trainings(step)
    found = [info.key for info in store.list(prefix)]
    return [key for key in found if _COMMIT_1_0.fullmatch(key.removeprefix(prefix))]


def place_of(header: Header) -> tuple[int, int, int]:
    """Return a training commit's pipeline stage, data-parallel rank and context-parallel rank."""
    cp_rank = _number_of(header, "cp_rank") if "cp_rank" in header.body else 0
    return _number_of(header, "stage"), _number_of(header, "dp_rank"), cp_rank


def recorded(header: Header) -> dict[str, Recorded] | None:
    """Return a training commit's entries, keyed by sample id; None in format 1.0.

    Raises TraceError if the entries are malformed.
    """
    if header.minor == 0:
        return None
    try:
        entries = field(header.body, "digests", listed(_entry))
    except ValueError as error:
        raise TraceError(f"{header.key}: {error}; remake the object") from error
    found = dict(entries)
    if len(found) != len(entries) or not same(header.body.get("samples"), len(entries)):
        raise TraceError(
            f"{header.key}: {len(entries)} digests for {len(found)} samples, expected one for each "
            f"of its {cut(header.body.get('samples'))} samples"
        )
    for id, entry in found.items():
        if entry.rows_valid > entry.rows:
            raise TraceError(
                f"{header.key}: sample {id}: {entry.rows_valid} valid rows, but its file contains "
                f"{entry.rows} rows of the sample"
            )
    return found


def _entry(value: Any) -> tuple[str, Recorded]:
    entry = items(value)
    if len(entry) != 5:
        raise ValueError(
            f"{len(entry)} values, expected 5: an id, two digests, the rows and the valid rows"
        )
    id, tokens, routes, rows, valid = entry
    return text(id), Recorded(text(tokens), text(routes), number(rows), number(valid))


def _listed(store: Store, step: int) -> TrainingSet | None:
    """Return the training set of a step in format 1.0, in which a set has no training.json.

    Returns None if there are no training commits.
    """
    prefix = keys.trainings(step)
    commits = []
    for name in listed_keys(store, step):
        header = read_header(store, name)
        stage, dp_rank = _number_of(header, "stage"), _number_of(header, "dp_rank")
        if not same(header.body.get("step"), step) or name != keys.training_1_0(
            step, stage, dp_rank
        ):
            raise TraceError(
                f"{name} in {store.uri}: a commit of step {cut(header.body.get('step'))}, "
                f"stage {stage}, data-parallel rank {dp_rank}"
            )
        commits.append(header)
    if not commits:
        return None
    first = geometry_of(commits[0])
    layers = sorted({layer for header in commits for layer in geometry_of(header).layers})
    whole = Geometry(first.experts, first.topk, tuple(layers))
    training = TrainingSet(f"{prefix} in {store.uri}", whole, _made(commits[0]), tuple(commits))
    training.check()
    return training


def geometry_of(header: Header) -> Geometry:
    """Return the geometry of a training commit. Raises TraceError if the geometry is missing."""
    if header.geometry is None:
        raise TraceError(f"{header.key}: no geometry in this commit")
    return header.geometry


def _made(header: Header) -> Provenance:
    if header.provenance is None:
        raise TraceError(f"{header.key}: no provenance in this commit")
    return header.provenance


def _commit(store: Store, manifest: Manifest, key: str, sha256: str) -> Header:
    header = read_training_commit(store, manifest, key)
    _refuse_1_0(header, f"{key} in {store.uri}")
    if header.sha256 != sha256:
        raise CorruptObjectError(
            f"{key} in {store.uri}: content {header.sha256[:16]}..., but "
            f"{keys.training_set(manifest.step)} records {sha256[:16]}...; restore the object"
        )
    return header


def _refuse_1_0(header: Header, name: str) -> None:
    """Raise TraceError for a training set or its commit in format 1.0, which has no such sets."""
    if header.minor == 0:
        raise TraceError(
            f"{name}: format {header.body['format']}, expected 1.1 or later for training.json and "
            "the commits that it lists; restore the object"
        )


def _check_step(header: Header, manifest: Manifest, name: str) -> None:
    """Raise TraceError unless a training set or commit belongs to this sealed step."""
    step, sealed = header.body.get("step"), header.body.get("manifest_sha256")
    if not same(step, manifest.step):
        raise TraceError(f"{name}: step {cut(step)}, expected {manifest.step}")
    if sealed != manifest.sha256:
        raise TraceError(
            f"{name}: recorded for a manifest with content {str(sealed)[:16]}..., but "
            f"{keys.manifest(manifest.step)} has {manifest.sha256[:16]}...; "
            "it belongs to a different run: restore the object"
        )


def _number_of(header: Header, name: str) -> int:
    try:
        return number(header.body[name])
    except (KeyError, TypeError) as error:
        raise TraceError(
            f"{header.key}: {name} is {cut(header.body.get(name))}, expected a number"
        ) from error
