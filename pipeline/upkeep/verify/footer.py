"""The part of `verify` that compares the footer of a trace's Parquet file with its commit."""

import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.model.geometry import Geometry
from pipeline.store import Store
from pipeline.traces.format.chunks import TraceFile, read_footer
from pipeline.traces.format.columns import check_columns
from pipeline.traces.format.header import Header
from pipeline.traces.format.pages import footer_metadata, stored_chunks
from pipeline.traces.format.schema import (
    MANIFEST,
    SAMPLES,
    absent_columns,
    check_metadata,
    parse_provenance,
    routes_schema,
)
from pipeline.traces.format.types import TraceError


def check_footer(store: Store, file: TraceFile, header: Header) -> None:
    """Raise TraceError unless a file's footer says what its commit `header` does.

    That is its metadata, the types of all its columns, its leaf columns and row groups, and the
    place of every column chunk. Raises the errors of `read_footer`.
    """
    name = file.data.key
    footer = read_footer(store, file)
    try:
        metadata = footer_metadata(footer, len(file.row_groups), file.leaves)
        geometry = header.geometry if file.role == "routes" else None
        minor = check_metadata(metadata.metadata, file.role, geometry, name)
        schema = _schema(file.role, geometry)
        there = {leaf.partition(".")[0] for leaf in file.leaves}
        absent_columns(schema.names, there, minor, name)
        check_columns(metadata, schema, name)
        for text in _problems(file, header, metadata, footer, schema):
            raise TraceError(f"{name}: {text}")
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{name}: its footer cannot be read: {error}") from error


def _problems(
    file: TraceFile, header: Header, metadata: pq.FileMetaData, footer: bytes, schema: pa.Schema
) -> Iterator[str]:
    text = {key.decode(): value.decode() for key, value in metadata.metadata.items()}
    if "retrace.producer" not in text:
        yield "its metadata has no retrace.producer"
    if file.role == "routes":
        made = parse_provenance(json.loads(text.get("retrace.provenance", "null")), file.data.key)
        if made != header.provenance:
            yield f"made by {made}, its commit says {header.provenance}"
    leaves = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    if leaves != list(file.leaves):
        yield f"columns {leaves[:99]}, its commit has {list(file.leaves)[:99]}"
        return
    if len(set(leaves)) != len(leaves):
        yield "two columns of one name"
    if file.role == "routes":
        layers = {leaf for leaf in leaves if leaf.startswith("layer_")}
        if strange := layers - set(schema.names):
            yield f"column {min(strange)}, which its geometry does not have"
    rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
    if rows != [group.rows for group in file.row_groups]:
        yield f"row groups of {rows} rows, its commit has others"
        return
    stored = stored_chunks(footer, len(leaves))
    for g, described in enumerate(file.row_groups):
        for leaf, chunk, found in zip(leaves, described.chunks, stored[g], strict=True):
            if (found.offset, found.length) != (chunk.offset, chunk.length):
                yield (
                    f"row group {g}: column {leaf} is {found.length} bytes from {found.offset}, "
                    f"its commit says {chunk.length} from {chunk.offset}"
                )


def _schema(role: str, geometry: Geometry | None) -> pa.Schema:
    if role == "routes":
        if geometry is None:
            raise ValueError("its commit names no geometry")
        return routes_schema(geometry)
    return SAMPLES if role == "samples" else MANIFEST
