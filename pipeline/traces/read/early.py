"""Reading committed shards before their step is sealed, and checking them once it is sealed.

shard = open_shard(store, step, 0)         # as soon as the shard's commit exists
routes = read_routes(store, shard, shard.ids)
...
ids = check_shard(read_manifest(store, step), shard)   # the samples that may now be used
"""

from pipeline.run import keys
from pipeline.store import Store
from pipeline.traces.format import domain
from pipeline.traces.format.header import check_place, read_header
from pipeline.traces.format.manifest import Manifest, check_manifest, refs_of
from pipeline.traces.format.schema import MANIFEST, SUMMARY
from pipeline.traces.format.shard_rows import shard_rows, versions_of
from pipeline.traces.format.types import TraceError


def open_shard(store: Store, step: int, shard: int) -> Manifest:
    """Return a committed rollout shard as a manifest of its own samples, in ascending id order.

    The result can be passed wherever a manifest is accepted: to `read_routes`, `read_samples` and
    the streams, which compare the data with the shard's commit. Do not use a sample's data before
    `check_shard` returns the sample's id.

    Args:
        store: The store of the run.
        step: The step.
        shard: The shard's number.

    Raises:
        ObjectMissingError: The shard is not committed yet, or its samples file is missing.
        CorruptObjectError: The commit or the file is damaged.
        StoreError: The store failed.
        TraceError: The commit is malformed or belongs to a different shard.
    """
    step = domain.check_number(step, domain.MOST_STEP, "step")
    shard = domain.check_number(shard, domain.MOST_SHARD, f"step {step}: shard")
    key = keys.rollout(step, shard)
    header = read_header(store, key)
    check_place(store, header, {"step": step, "shard": shard})
    rows = shard_rows(store, header, 0).sort_by("id")
    return Manifest(
        step=step,
        policy_versions=versions_of(rows),
        geometry=header.geometry,
        provenance=header.provenance,
        files=tuple(refs_of(header)),
        rows=rows.select(MANIFEST.names).cast(MANIFEST),
        policies=header.policies,
    )


def check_shard(sealed: Manifest, shard: Manifest) -> list[str]:
    """Return the ids of an early shard's samples that the sealed step contains.

    The ids are in the step's order. Raises TraceError if the step was sealed with a different
    commit of this shard, or if a sample's columns differ between the manifest and the shard. Also
    raises TraceError for a step without its rows, such as the result of `open_manifest`, and for a
    manifest of the trainer's routes (R2), such as the result of `used_routes`.
    """
    if not check_manifest(sealed, "sealed step").ids:
        raise TraceError(
            f"sealed step: the manifest of step {sealed.step} has no rows, expected its samples; "
            "use read_manifest or .all()"
        )
    check_manifest(shard, "shard")
    name = f"step {sealed.step}: {shard.files[0].commit}"
    kinds = [of.provenance.kind if of.provenance else None for of in (sealed, shard)]
    if kinds[0] == "R2" != kinds[1]:
        raise TraceError(
            f"{name}: a manifest of routes recorded by the trainer (R2), expected one of the "
            "shards' routes; pass read_manifest(store, step) of the run"
        )
    if missing := [ref for ref in shard.files if ref not in sealed.files]:
        raise TraceError(
            f"{name}: the step was not sealed with {missing[0].key} of commit "
            f"{missing[0].commit_sha256[:16]}..., which was read early; read the sealed step"
        )
    ids = [id for id in sealed.ids if id in shard.numbers]
    theirs, ours = (m.select(ids).select(SUMMARY.names) for m in (sealed, shard))
    for column in SUMMARY.names:
        if theirs[column].combine_chunks() != ours[column].combine_chunks():
            raise TraceError(
                f"{name}: {column} of its samples differs between the sealed step and the "
                "shard; remake the step"
            )
    return ids
