"""Committed shards before their step is sealed: fetched early, compared with the seal later.

shard = open_shard(store, step, 0)         # as soon as its commit is there
routes = read_routes(store, shard, shard.ids)
...
ids = check_shard(read_manifest(store, step), shard)   # these exist; use them now
"""

from pipeline.run import keys
from pipeline.store import Store
from pipeline.traces.format.header import read_header
from pipeline.traces.format.manifest import Manifest, refs_of
from pipeline.traces.format.schema import MANIFEST, SUMMARY
from pipeline.traces.format.shard_rows import shard_rows
from pipeline.traces.format.types import TraceError


def open_shard(store: Store, step: int, shard: int) -> Manifest:
    """A committed rollout shard in the form of a manifest of its samples alone, ascending by id.

    Everything that takes a manifest reads it: `read_routes`, `read_samples`, the streams. What is
    read is compared with the shard's commit; use none of it before `check_shard` has found it in
    the sealed step. Raises ObjectMissingError while the shard is not committed; TraceError,
    CorruptObjectError, StoreError.
    """
    key = keys.rollout(step, shard)
    header = read_header(store, key)
    place = {"step": step, "shard": shard}
    if (found := {name: header.body.get(name) for name in place}) != place:
        raise TraceError(f"{key} in {store.uri}: it is the commit of {found}")
    rows = shard_rows(store, header, 0).sort_by("id").select(MANIFEST.names).cast(MANIFEST)
    return Manifest(
        step=step,
        policy_versions=tuple(sorted(set(rows["policy_version"].to_pylist()))),
        geometry=header.geometry,
        provenance=header.provenance,
        files=tuple(refs_of(header)),
        rows=rows,
        policies=header.policies,
    )


def check_shard(sealed: Manifest, shard: Manifest) -> list[str]:
    """The ids of an early shard's samples that the sealed step has, in the step's order.

    Raises TraceError when the step was sealed with another commit of this shard, or says something
    else of a sample than the shard does.
    """
    name = f"step {sealed.step}: {shard.files[0].commit}"
    if missing := [ref for ref in shard.files if ref not in sealed.files]:
        raise TraceError(
            f"{name}: the step was not sealed with {missing[0].key} of commit "
            f"{missing[0].commit_sha256[:16]}..., which was read before; read the sealed step anew"
        )
    ids = [id for id in sealed.ids if id in shard.numbers]
    theirs, ours = (m.select(ids).select(SUMMARY.names) for m in (sealed, shard))
    for column in SUMMARY.names:
        if theirs[column].combine_chunks() != ours[column].combine_chunks():
            raise TraceError(
                f"{name}: its samples have another {column} in the sealed step than in the "
                "shard; remake the step"
            )
    return ids
