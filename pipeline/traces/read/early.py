"""Reading committed shards before their step is sealed, and checking them once it is sealed.

shard = open_shard(store, step, 0)         # as soon as the shard's commit exists
routes = read_routes(store, shard, shard.ids)
...
ids = check_shard(read_manifest(store, step), shard)   # the samples that may now be used
"""

from collections.abc import Set
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.run import keys
from pipeline.store import Store
from pipeline.traces.format import domain
from pipeline.traces.format.header import Header, file_of, read_header
from pipeline.traces.format.manifest import BASELINE, NO_REWARD, Manifest, check_manifest
from pipeline.traces.format.parquet import open_file
from pipeline.traces.format.schema import MANIFEST, SAMPLES, SUMMARY
from pipeline.traces.format.types import TraceError

_SHARD = pa.schema([*SUMMARY, SAMPLES.field("segments"), SAMPLES.field("version_spans")])


def read_shard_header(store: Store, step: int, shard: int) -> Header:
    """Read the commit of a rollout shard. Raises the same errors as `open_shard`.

    Args:
        store: The store of the run.
        step: The step.
        shard: The shard's number.
    """
    step = domain.check_number(step, domain.MOST_STEP, "step")
    shard = domain.check_number(shard, domain.MOST_SHARD, f"step {step}: shard")
    return read_header(store, keys.rollout(step, shard), {"step": step, "shard": shard})


def open_shard(store: Store, step: int, shard: int) -> Manifest:
    """Return a committed rollout shard as a manifest of its own samples, in ascending id order.

    The result can be passed wherever a manifest is accepted: to `read_routes`, `read_samples` and
    the streams. Do not use a sample's data before `check_shard` returns the sample's id.

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
    header = read_shard_header(store, step, shard)
    rows = shard_rows(store, header, 0).sort_by("id")
    return Manifest(
        step=int(step),
        policy_versions=versions_of(rows),
        geometry=header.geometry,
        provenance=header.provenance,
        files=header.files,
        rows=rows.select(MANIFEST.names).cast(MANIFEST),
        policies=header.policies,
        run=header.run,
    )


def check_shard(sealed: Manifest, shard: Manifest) -> list[str]:
    """Return the ids of an early shard's samples that the sealed step contains.

    The ids are in the step's order. Raises TraceError if the step was sealed with a different
    commit of this shard. Also raises TraceError for a step without its rows, such as the result of
    `open_manifest`, and for a manifest of the trainer's routes, such as the result of
    `used_routes`.
    """
    if not check_manifest(sealed, "sealed step").ids:
        raise TraceError(
            f"sealed step: the manifest of step {sealed.step} has no rows, expected its samples; "
            "use read_manifest or .all()"
        )
    check_manifest(shard, "shard")
    kinds = [of.provenance.kind if of.provenance else None for of in (sealed, shard)]
    if kinds[0] == "R2" != kinds[1]:
        raise TraceError(
            f"step {sealed.step}: a manifest of routes recorded by the trainer (R2), expected one "
            "of the shards' routes; pass read_manifest(store, step) of the run"
        )
    if missing := [file for file in shard.files if file not in sealed.files]:
        raise TraceError(
            f"step {sealed.step}: it was not sealed with {missing[0].key}, which was read early; "
            "read the sealed step"
        )
    return [id for id in sealed.ids if id in shard.numbers]


def shard_rows(
    store: Store, header: Header, first: int, baselines: Set[str] = frozenset()
) -> pa.Table:
    """Read the manifest rows of a rollout shard, with their version spans.

    Args:
        store: The store that contains the shard.
        header: The shard's commit.
        first: The number of the shard's first file in the manifest's list.
        baselines: Ids of greedy samples.

    Returns:
        One row per sample: the columns of schema.MANIFEST, then segments and version spans.

    Raises:
        TraceError: The commit does not list a required file.
    """
    numbers = {file.role: first + i for i, file in enumerate(header.files)}
    table = open_file(store, file_of(header, "samples")).read(_SHARD)
    rows = len(table)
    samples = _structs(
        file=np.full(rows, numbers["samples"], np.int32), row=np.arange(rows, dtype=np.int32)
    )
    if header.geometry is None:
        routes = pa.nulls(rows, MANIFEST.field("routes").type)
    else:
        number = first + header.files.index(file_of(header, "routes"))
        part = _structs(
            file=np.full(rows, number, np.int32), segments=table["segments"].combine_chunks()
        )
        routes = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32), part)
    not_trained = pc.if_else(pc.is_null(table["reward"]), NO_REWARD, pa.scalar(None, pa.string()))
    not_trained = pc.if_else(is_one_of(table["id"], baselines), BASELINE, not_trained)
    for name, column in {"samples": samples, "routes": routes, "not_trained": not_trained}.items():
        table = table.append_column(name, column)
    return table


def is_one_of(column: pa.ChunkedArray, names: Set[str]) -> pa.ChunkedArray:
    """Return whether each text is one of `names`.

    Arrow hashes all names that it is given. It is given only those in the column, because a step
    may have thousands of names, and each of its thousands of shards a few of them.
    """
    present = [text for text in pc.unique(column).to_pylist() if text in names] if names else []
    return pc.is_in(column, pa.array(present, pa.string()))


def versions_of(rows: pa.Table) -> tuple[int, ...]:
    """Return the policy versions in the `version_spans` of samples, ascending."""
    spans = pc.list_flatten(rows["version_spans"])
    return tuple(sorted(pc.unique(pc.struct_field(spans, "version")).to_pylist()))


def _structs(**fields: Any) -> pa.StructArray:
    return pa.StructArray.from_arrays([pa.array(f) for f in fields.values()], names=list(fields))
