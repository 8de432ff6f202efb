"""The part of `verify` that compares the footer of a trace's Parquet file with its commit."""

import io
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.model.geometry import Geometry
from pipeline.run.strict_json import parse_json
from pipeline.store import Store
from pipeline.traces.format.chunks import TAIL, TraceFile, read_footer
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

_COMPARED = frozenset({1, 2, 3, 5, 6})
"""Fields of `Statistics` in parquet.thrift: maximum and minimum in their old and new form, and the
number of nulls."""


def check_footer(store: Store, file: TraceFile, header: Header) -> None:
    """Raise TraceError unless a file's footer agrees with its commit.

    Compares the metadata, the types of all columns, the leaf columns, the row groups, and the
    position of every column chunk. Also raises the same errors as `read_footer`.

    Args:
        store: The run or recorded set.
        file: The file as described in its commit.
        header: The commit.
    """
    name = file.data.key
    footer = read_footer(store, file)
    try:
        metadata = footer_metadata(footer, len(file.row_groups), file.leaves)
        geometry = header.geometry if file.role == "routes" else None
        minor = check_metadata(metadata.metadata, file.role, geometry, name)
        schema = _schema(file.role, geometry)
        there = set(map(_column, file.leaves))
        absent_columns(schema.names, there, minor, name)
        check_columns(metadata, schema, name)
        for text in _problems(file, header, metadata, footer, schema):
            raise TraceError(f"{name}: {text}")
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{name}: its footer cannot be read: {error}") from error


def check_statistics(footer: bytes, file: TraceFile, group: int, table: pa.Table) -> None:
    """Raise TraceError unless a row group's statistics agree with its values.

    Readers of the format ignore statistics, but other Parquet tools use them to skip row groups.

    Args:
        footer: The checked footer of the file, from `read_footer`.
        file: The samples file or the manifest's file of rows.
        group: The row group's number.
        table: The row group's rows.
    """
    stored = stored_chunks(footer, len(file.leaves))[group]
    stated = {
        leaf: chunk.statistics
        for leaf, chunk in zip(file.leaves, stored, strict=True)
        if _column(leaf) in table.schema.names and not _COMPARED.isdisjoint(chunk.statistics)
    }
    if not stated or not len(table):
        return
    out = io.BytesIO()
    written = table.select(sorted(set(map(_column, stated)))).combine_chunks()
    pq.write_table(written, out, use_dictionary=False, row_group_size=len(table))
    content = out.getvalue()
    with pq.ParquetFile(out) as parquet:
        schema = parquet.metadata.schema
    leaves = [schema.column(i).path for i in range(len(schema.names))]
    size = int.from_bytes(content[-TAIL:-4], "little") + TAIL
    (chunks,) = stored_chunks(content[-size:], len(leaves))
    found = {leaf: chunk.statistics for leaf, chunk in zip(leaves, chunks, strict=True)}
    for leaf, statistics in stated.items():
        expected = found.get(leaf, {})
        if any(expected.get(key) != statistics[key] for key in _COMPARED & statistics.keys()):
            raise TraceError(
                f"{file.data.key}: row group {group}: column {leaf} has statistics that differ "
                "from its values; remake the step, without statistics"
            )


def _column(leaf: str) -> str:
    return leaf.partition(".")[0]


def _problems(
    file: TraceFile, header: Header, metadata: pq.FileMetaData, footer: bytes, schema: pa.Schema
) -> Iterator[str]:
    text = {key.decode(): value.decode() for key, value in metadata.metadata.items()}
    if text["retrace.format"] != header.body["format"]:
        yield (
            f"its format is {text['retrace.format']}, but its commit has the format "
            f"{header.body['format']}; remake the step"
        )
    if "retrace.producer" not in text:
        yield "its metadata has no retrace.producer"
    if file.role == "routes":
        made = parse_provenance(parse_json(text.get("retrace.provenance", "null")), file.data.key)
        if made != header.provenance:
            yield f"its provenance is {made}, but its commit records {header.provenance}"
    leaves = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    if leaves != list(file.leaves):
        yield f"it has columns {leaves[:99]}, but its commit lists {list(file.leaves)[:99]}"
        return
    if len(set(leaves)) != len(leaves):
        yield "two columns have the same name"
    if file.role == "routes":
        layers = {leaf for leaf in leaves if leaf.startswith("layer_")}
        if strange := layers - set(schema.names):
            yield f"it has column {min(strange)}, but the geometry in its commit has no such layer"
    rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
    if rows != [group.rows for group in file.row_groups]:
        yield f"its row groups have {rows} rows, but its commit lists different row counts"
        return
    stored = stored_chunks(footer, len(leaves))
    for g, described in enumerate(file.row_groups):
        for leaf, chunk, found in zip(leaves, described.chunks, stored[g], strict=True):
            if found.has_index:
                yield f"row group {g}: column {leaf} has a page index or a Bloom filter"
            if (found.offset, found.length) != (chunk.offset, chunk.length):
                yield (
                    f"row group {g}: column {leaf} has {found.length} bytes at offset "
                    f"{found.offset}, but its commit records {chunk.length} bytes at offset "
                    f"{chunk.offset}"
                )


def _schema(role: str, geometry: Geometry | None) -> pa.Schema:
    if role == "routes":
        if geometry is None:
            raise ValueError("no geometry in its commit")
        return routes_schema(geometry)
    return SAMPLES if role == "samples" else MANIFEST
