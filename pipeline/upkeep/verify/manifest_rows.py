"""The part of `verify` that checks whether a sealed manifest is consistent and fits its shards."""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import cut
from pipeline.run import keys
from pipeline.run.parse import same
from pipeline.traces.format.header import Header, source
from pipeline.traces.format.ids import named
from pipeline.traces.format.manifest import FileRef, Manifest
from pipeline.traces.format.policies import policies_text, united
from pipeline.traces.format.schema import SUMMARY
from pipeline.traces.format.shard_rows import NO_REWARD, versions_of
from pipeline.traces.format.types import TraceError
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.shards import Shard

_OF_ROUTES = ("routes_digest", "rows_valid")
"""Sample columns whose values depend on which recording supplies the step's routes."""


class ManifestRows:
    """Checks the rows and the JSON of a sealed step's manifest against the objects that it names.

    `shards` contains the readable shards of the step, and `headers` contains all readable commits
    that the manifest names. Both are keyed by the commit's key.
    """

    def __init__(
        self,
        manifest: Manifest,
        counts: object,
        shards: Mapping[str, Shard],
        headers: Mapping[str, Header],
        report: Report,
    ) -> None:
        self._manifest, self._counts = manifest, counts
        self._shards, self._headers, self._report = shards, headers, report
        self._key = keys.manifest(manifest.step)
        self._rows = manifest.rows
        self._roles = [_role(ref, headers) for ref in manifest.files]

    def check(self) -> None:
        """Report all contradictions between the manifest and the objects that it names."""
        before = self._report.found
        with self._report.noting(self._key):
            self._check_places()
        if self._report.found > before:
            return  # the other checks rely on correct places
        for check in (
            self._check_order,
            self._check_samples,
            self._check_all_used,
            self._check_counts,
            self._check_sources,
            self._check_policies,
            self._check_not_trained,
            self._check_part_digests,
        ):
            with self._report.noting(self._key):
                check()

    @property
    def _complete(self) -> bool:
        """Whether all objects in the manifest are readable.

        Unreadable objects have already been reported.
        """
        read = {key for key, shard in self._shards.items() if shard.rows is not None}
        read |= {key for key in self._headers if "/rollout/" not in key}
        return len(self._shards.keys() - read) == 0 and all(
            ref.commit in read for ref in self._manifest.files
        )

    @property
    def _files(self) -> npt.NDArray[np.int64]:
        return _field(self._rows["samples"], "file")

    def _check_places(self) -> None:
        """Check that every file number refers to a file with the correct role.

        Each file must be listed only once. Rows must refer to every file, unless groups were
        rejected or the file's shard has no samples.
        """
        routes = pc.struct_field(pc.list_flatten(self._rows["routes"]), "file").to_numpy()
        for role, numbers in (("samples", self._files), ("routes", routes)):
            for number in np.unique(numbers).tolist():
                if not 0 <= number < len(self._roles):
                    raise TraceError(
                        f"{self._key}: a row refers to file {number}, but data lists "
                        f"{len(self._roles)} files, counted from 0"
                    )
                if self._roles[number] not in (role, None):
                    key = self._manifest.files[number].key
                    raise TraceError(
                        f"{self._key}: its {role} are in {key}, which has a different role"
                    )
        seen = Counter(ref.key for ref in self._manifest.files)
        if max(seen.values(), default=1) > 1:
            raise TraceError(f"{self._key}: data lists {seen.most_common(1)[0][0]} twice")
        if self._manifest.rejected:
            return  # all groups of a shard may have been rejected
        used = {*self._files.tolist(), *routes.tolist()}
        for number, ref in enumerate(self._manifest.files):
            header = self._headers.get(ref.commit)
            if number not in used and header is not None and header.body.get("samples") != 0:
                raise TraceError(f"{self._key}: data lists {ref.key}, but no row refers to it")

    def _check_order(self) -> None:
        """Check that rows are sorted by shard and, within a shard, by the bytes of their ids.

        The manifest's `data` may list the shards in any order.
        """
        files, ids = self._files, self._rows["id"].to_pylist()
        headers = [self._headers.get(ref.commit) for ref in self._manifest.files]
        shards = [-1 if header is None else header.body.get("shard", -1) for header in headers]
        of_row = np.array(shards, np.int64)[files]
        if (np.diff(of_row[of_row >= 0]) < 0).any():  # unreadable shards are already reported
            raise TraceError(f"{self._key}: its rows are not in shard order")
        encoded = [id.encode() for id in ids]
        for row, (one, two) in enumerate(pairwise(encoded)):
            if files[row] == files[row + 1] and one >= two:
                raise TraceError(
                    f"{self._key}: rows are out of order or repeated: sample {ids[row + 1]} comes "
                    f"after {ids[row]}"
                )

    def _check_samples(self) -> None:
        """Check that a sample has at most one row, and that the row repeats the sample's values."""
        files, places = self._files, _field(self._rows["samples"], "row")
        for number, ref in enumerate(self._manifest.files):
            shard = self._shards.get(ref.commit)
            if self._roles[number] != "samples" or shard is None or shard.rows is None:
                continue  # unreadable shards are already reported
            mine = np.flatnonzero(files == number)
            at = places[mine]
            if ((at < 0) | (at >= len(shard.rows))).any():
                raise TraceError(
                    f"{self._key}: it refers to row {at.max()} of {ref.key}, which has "
                    f"{len(shard.rows)} rows"
                )
            if len(np.unique(at)) != len(at):
                raise TraceError(f"{self._key}: two rows for one sample of {ref.key}")
            rows, samples = self._rows.take(mine), shard.rows.take(at)
            self._check_equal(ref, rows, samples, self._own_routes(number, mine))
            left = np.setdiff1d(np.arange(len(shard.rows)), at)
            self._check_rejected(ref, shard.rows.take(left))

    def _own_routes(self, number: int, mine: npt.NDArray[np.int64]) -> bool:
        """Return whether some rows use the routes that their shard recorded.

        Raises TraceError if some rows use the routes of a different shard.
        """
        commit = self._manifest.files[number].commit
        parts = pc.list_flatten(self._rows["routes"].take(mine))
        files = np.unique(pc.struct_field(parts, "file").to_numpy()).tolist()
        commits = {self._manifest.files[file].commit for file in files}
        for other in sorted(commits - {commit}):
            if other in self._shards:
                raise TraceError(f"{self._key}: samples of {commit} use routes from {other}")
        return commits == {commit}

    def _check_equal(
        self, ref: FileRef, rows: pa.Table, samples: pa.Table, own_routes: bool
    ) -> None:
        compared = [name for name in SUMMARY.names if own_routes or name not in _OF_ROUTES]
        for name in compared:
            self._compare(ref, name, rows, rows[name], samples[name])
        if own_routes:
            sizes = pc.list_value_length(rows["routes"]).to_numpy()
            for id in rows["id"].filter(pa.array(sizes != 1)).slice(0, 1).to_pylist():
                raise TraceError(
                    f"{self._key}: sample {id}: its routes are listed in several parts, although "
                    "they come from one shard"
                )
            segments = pc.struct_field(pc.list_flatten(rows["routes"]), "segments")
            self._compare(ref, "segments", rows, segments, samples["segments"])

    def _compare(
        self,
        ref: FileRef,
        name: str,
        rows: pa.Table,
        ours: pa.ChunkedArray,
        theirs: pa.ChunkedArray,
    ) -> None:
        if ours.equals(theirs):
            return
        for id, found, expected in zip(
            rows["id"].to_pylist(), ours.to_pylist(), theirs.to_pylist(), strict=True
        ):
            if found != expected:
                text = f"{name} is {cut(found)}, but {ref.key} has {cut(expected)}"
                self._report.add(self._key, text, id)
                return

    def _check_rejected(self, ref: FileRef, left: pa.Table) -> None:
        """Check that, if a sample of a shard has no row, the sample's group is rejected."""
        rejected = {group.group for group in self._manifest.rejected}
        lost = [
            row["id"]
            for row in left.select(["id", "group"]).to_pylist()
            if row["group"] not in rejected
        ]
        if lost:
            raise TraceError(
                f"{self._key}: samples of {ref.key} have no rows and are not rejected: "
                f"{named('missing', lost)}"
            )

    def _check_all_used(self) -> None:
        """Check that the manifest names all shards, and that they contain the rejected groups."""
        if not self._complete:
            return
        commits = {ref.commit for ref in self._manifest.files}
        if late := sorted(self._shards.keys() - commits):
            raise TraceError(f"{self._key}: {named('it does not name the shards', late)}")
        shards = sorted(int(key[-10:-5]) for key in self._shards)
        if shards != list(range(len(shards))):
            raise TraceError(f"{self._key}: shards {shards}, expected 0..{len(shards) - 1}")
        made: Counter[str] = Counter()
        for shard in self._shards.values():
            made.update(shard.rows["group"].to_pylist() if shard.rows is not None else ())
        rows = set(self._rows["group"].to_pylist())
        groups = [group.group for group in self._manifest.rejected]
        for group in self._manifest.rejected:
            name = f"{self._key}: rejected group {group.group}"
            if not made[group.group]:
                raise TraceError(f"{name}: no shard has a sample of this group")
            if made[group.group] != group.samples:
                raise TraceError(
                    f"{name}: found {group.samples} samples, expected the "
                    f"{made[group.group]} samples of this group in the shards"
                )
            if group.group in rows:
                raise TraceError(f"{name}: its samples have rows, expected none")
        if len(set(groups)) != len(groups):
            raise TraceError(f"{self._key}: a rejected group is listed twice")

    def _check_counts(self) -> None:
        valid = self._rows["rows_valid"]
        total = pc.sum(self._rows["rows_total"]).as_py() or 0
        expected = {
            "samples": len(self._rows),
            "tokens": total + len(self._rows),
            "rows_total": total,
            "rows_valid": None if valid.null_count else pc.sum(valid).as_py() or 0,
        }
        if not same(self._counts, expected):
            raise TraceError(f"{self._key}: counts {self._counts}, but its rows have {expected}")

    def _check_sources(self) -> None:
        """Compare geometry and provenance with those in the objects that the manifest names."""
        manifest = self._manifest
        if (manifest.geometry is None) != (manifest.provenance is None):
            raise TraceError(
                f"{self._key}: geometry and provenance go together, but only one of them is present"
            )
        for key, shard in self._shards.items():
            if manifest.geometry is None and shard.header.geometry is not None:
                raise TraceError(f"{self._key}: no geometry, but {key} has routes")
        with_routes = {
            ref.commit: self._headers[ref.commit]
            for ref, role in zip(manifest.files, self._roles, strict=True)
            if role == "routes" and ref.commit in self._headers
        }
        layers: set[int] = set()
        for header in with_routes.values():
            ours, theirs = manifest.geometry, header.geometry
            if ours is None or theirs is None or manifest.provenance is None:
                raise TraceError(f"{self._key}: no geometry, but {header.key} has routes")
            layers |= set(theirs.layers)
            said, made = source(manifest.provenance), source(header.provenance)
            if said != made:
                raise TraceError(
                    f"{self._key}: its routes have {said}, but those of {header.key} have {made}"
                )
            if (ours.experts, ours.topk) != (theirs.experts, theirs.topk):
                raise TraceError(
                    f"{self._key}: its geometry is {ours}, but {header.key} records {theirs}"
                )
        engines = {h.provenance.engine for h in with_routes.values() if h.provenance is not None}
        if with_routes and manifest.geometry is not None and manifest.provenance is not None:
            if layers != set(manifest.geometry.layers):
                raise TraceError(
                    f"{self._key}: layers {list(manifest.geometry.layers)}, but its files have "
                    f"{sorted(layers)}"
                )
            if manifest.provenance.engine not in engines:
                raise TraceError(
                    f"{self._key}: its engine is {cut(manifest.provenance.engine)}, but the "
                    f"commits of its files record {sorted(engines)}"
                )

    def _check_policies(self) -> None:
        """Compare the policy versions and their weights with all shards combined."""
        if not self._complete:
            return
        shards = list(self._shards.values())
        versions = sorted({v for s in shards if s.rows is not None for v in versions_of(s.rows)})
        found = list(self._manifest.policy_versions)
        if found != sorted(set(found)) or not set(versions) <= set(found):
            raise TraceError(
                f"{self._key}: policy_versions {found}, but its samples have {versions}"
            )
        if len(self._rows) and found != versions:
            raise TraceError(
                f"{self._key}: policy_versions {found}, but its samples have {versions}"
            )
        expected = united((shard.header.key, shard.header.policies) for shard in shards)
        if shards and self._manifest.policies != expected:
            raise TraceError(
                f"{self._key}: policies {policies_text(self._manifest.policies)}, but its shards "
                f"have {policies_text(expected)}"
            )

    def _check_not_trained(self) -> None:
        """Check that not_trained agrees with the rewards.

        If a sample has no reward, its not_trained must not be null. Only a sample without a reward
        may have the value NO_REWARD.
        """
        if self._manifest.format == "1.0":
            return
        if not len(self._rows):
            raise TraceError(f"{self._key}: no samples, expected at least one")
        untrained = pc.is_null(self._rows["not_trained"])
        silent = pc.and_(pc.is_null(self._rows["reward"]), untrained)
        for id in self._rows["id"].filter(silent).slice(0, 1).to_pylist():
            raise TraceError(f"{self._key}: sample {id}: no reward, but not_trained is null")
        wrong = pc.and_(
            pc.is_valid(self._rows["reward"]), pc.equal(self._rows["not_trained"], NO_REWARD)
        )
        for id in self._rows["id"].filter(wrong).slice(0, 1).to_pylist():
            raise TraceError(
                f"{self._key}: sample {id}: not_trained is {NO_REWARD!r}, but it has a reward"
            )

    def _check_part_digests(self) -> None:
        """Check that a row with part digests has one for each part of its routes.

        If there is only one part, its digest must equal the digest of the sample's routes.
        """
        some = pc.is_valid(self._rows["part_digests"])
        columns = ["id", "routes", "routes_digest", "part_digests"]
        for row in self._rows.filter(some).select(columns).to_pylist():
            parts, digests = row["routes"] or [], row["part_digests"]
            if len(digests) != len(parts) or (
                len(parts) == 1 and digests != [row["routes_digest"]]
            ):
                raise TraceError(
                    f"{self._key}: sample {row['id']}: part_digests {digests} do not match its "
                    f"{len(parts)} parts"
                )


def _field(column: pa.ChunkedArray, name: str) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = pc.struct_field(column, name).to_numpy().astype(np.int64)
    return found


def _role(ref: FileRef, headers: Mapping[str, Header]) -> str | None:
    """Return the role of a file in its commit; None if the commit is unreadable."""
    header = headers.get(ref.commit)
    files = () if header is None else header.files
    return next((file.role for file in files if file.data.sha256 == ref.sha256), None)
