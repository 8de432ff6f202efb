"""Files whose decoded content would exceed the bounds are refused before decoding. Files that a
writer can produce are read."""

import io
import random
import re
import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.model.geometry import Geometry
from pipeline.run.commit import DataFile, sha256
from pipeline.traces import TraceError
from pipeline.traces.format.chunks import TraceFile, describe, read_table
from pipeline.traces.format.pages import Page, stored_chunks, walk_pages
from pipeline.traces.format.schema import SAMPLES, file_metadata, routes_schema
from tests.memory_store import MemoryStore
from tests.samples import R3, make_samples, sealed_r3

GEOMETRY = Geometry(16, 4, (1, 2))
SAMPLE = {
    "id": "000000/1/0",
    "group": "000000/1",
    "prompt_id": "1",
    "policy_version": 0,
    "prompt_length": 1,
    "response_length": 0,
    "token_digest": "",
    "rows_total": 0,
    "finish_reason": "stop",
    "seed": 0,
    "extras": "{}",
    "prompt_tokens": [],
    "response_tokens": [],
    "loss_mask": [],
    "logprobs": [],
    "version_spans": [],
}

_NULLS = 3
"""The number of nulls, as a field of `Statistics` in parquet.thrift."""


def stored(
    table: pa.Table, role: str, of: Geometry = GEOMETRY, **options
) -> tuple[MemoryStore, TraceFile]:
    """Store a file and return its description, in which all digests match the file."""
    geometry = of if role == "routes" else None
    meta = file_metadata(role, geometry, R3 if geometry else None)
    out = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(meta), out, compression="zstd", **options)
    content = out.getvalue()
    data = DataFile("file", len(content), sha256(content))
    return MemoryStore({"file": content}), describe(content, data, role)


def samples_with(rows: int = 1, **columns: pa.Array) -> pa.Table:
    table = pa.Table.from_pylist([SAMPLE] * rows, SAMPLES)
    for name, values in columns.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, pa.field(name, values.type), values)
    return table


def refused(
    store: MemoryStore,
    file: TraceFile,
    schema: pa.Schema,
    says: str,
    geometry: Geometry | None = None,
) -> None:
    """Check that a read is refused before decoding: it takes little memory."""
    pa.default_memory_pool().release_unused()
    before = pa.total_allocated_bytes()
    peak = pa.default_memory_pool().max_memory()
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=re.escape(says)):
            read_table(store, file, schema, geometry=geometry)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert pa.default_memory_pool().max_memory() <= max(peak, before + 20e6)


def tokens(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


@pytest.mark.parametrize("encoding", [None, "DELTA_BINARY_PACKED", "PLAIN"])
def test_run_lengths_that_claim_many_tokens_are_refused(encoding):
    """A file of a few kilobytes contains millions of copies of one token."""
    values = tokens(pa.array(np.zeros(20_000_000, np.uint32)))
    options = {"use_dictionary": encoding is None}
    if encoding:
        options["column_encoding"] = {"prompt_tokens.list.element": encoding}
    store, file = stored(samples_with(prompt_tokens=values), "samples", **options)
    assert file.data.size < 100_000
    refused(store, file, SAMPLES, "20000000 values in a row group of")


def test_run_lengths_that_claim_many_rows_are_refused():
    rows = pa.DictionaryArray.from_arrays(np.zeros(20_000_000, np.int8), pa.array(["a"]))
    store, file = stored(pa.table({"finish_reason": rows}), "samples", row_group_size=1 << 30)
    assert file.data.size < 100_000
    says = "20000000 values in a row group of"
    refused(store, file, pa.schema([SAMPLES.field("finish_reason")]), says)


@pytest.mark.parametrize("column", ["reward_error", "id", "extras"])
def test_long_texts_repeated_through_a_dictionary_are_refused(column):
    """A one-megabyte text in ten thousand rows would take 10 GB."""
    many = 10_000
    text = random.Random(0).randbytes(500_000).hex()
    values = pa.DictionaryArray.from_arrays(np.zeros(many, np.int32), pa.array([text]))
    store, file = stored(samples_with(many, **{column: values}), "samples")
    assert file.data.size < 1_500_000
    with pytest.raises(TraceError, match=rf"\d+ bytes of {column}, expected at most"):
        read_table(store, file, SAMPLES)
    assert pa.total_allocated_bytes() < 100e6


def test_a_long_text_among_short_ones_is_read():
    """The bound applies to the total length of the rows' texts, not to the longest length times the
    number of rows."""
    many = 10_000
    text = "x" * 100_000
    texts = pa.DictionaryArray.from_arrays([0, *[1] * (many - 1)], pa.array([text, "{}"]))
    store, file = stored(samples_with(many, extras=texts), "samples")
    table = read_table(store, file, SAMPLES)
    assert table["extras"][0].as_py() == text
    assert set(table["extras"][1:].to_pylist()) == {"{}"}
    assert table.schema == SAMPLES


def test_long_texts_that_share_their_beginnings_are_refused():
    """With DELTA_BYTE_ARRAY, each value is the previous value plus a few bytes."""
    many = 6_000
    text = "x" * 50_000
    table = samples_with(many, extras=pa.array([text[:-1] + c for c in "ab"] * (many // 2)))
    encodings = {"column_encoding": {"extras": "DELTA_BYTE_ARRAY"}, "use_dictionary": False}
    store, file = stored(table, "samples", data_page_size=1 << 30, **encodings)
    refused(store, file, SAMPLES, "its texts share their beginnings and may be too long")


def test_coded_sets_that_decompress_without_bound_are_refused():
    rows = {"owner": ["a"], "token_start": [0], "tokens": [1 << 28], "validity": [None]}
    layers = {f"layer_{layer:05d}": [bytes(200 << 20)] for layer in GEOMETRY.layers}
    table = pa.table({**rows, **layers}, routes_schema(GEOMETRY))
    store, file = stored(table, "routes", use_dictionary=False, write_statistics=False)
    assert file.data.size < 100_000
    refused(store, file, routes_schema(GEOMETRY), "stored bytes decode to", GEOMETRY)


def test_one_set_in_every_row_of_many_layers_is_read():
    """The largest possible sets fill a row group: a few kilobytes decode to 400 MB."""
    geometry = Geometry(65_536, 64, tuple(range(100)))
    many = 32_768
    rows = {"owner": ["a"], "token_start": [0], "tokens": [many], "validity": [None]}
    coded = pa.array([bytes(many * 64 * 2)], pa.binary())
    table = pa.table(
        {**rows, **{f"layer_{layer:05d}": coded for layer in geometry.layers}},
        routes_schema(geometry),
    )
    store, file = stored(table, "routes", geometry, use_dictionary=False, write_statistics=False)
    assert file.data.size < 100_000
    assert read_table(store, file, routes_schema(geometry), geometry=geometry).equals(table)


def test_unknown_rows_compress_without_bound_and_are_read():
    """A row group of a long sample with unknown routing consists of zeros, which is valid."""
    many = 32_768
    rows = {"owner": ["a"], "token_start": [0], "tokens": [many], "validity": [bytes(many // 8)]}
    layers = {f"layer_{layer:05d}": [bytes(many * 4)] for layer in GEOMETRY.layers}
    table = pa.table({**rows, **layers}, routes_schema(GEOMETRY))
    store, file = stored(table, "routes", use_dictionary=False)
    assert read_table(store, file, routes_schema(GEOMETRY)).equals(table)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd"])
def test_all_pages_of_a_chunk_are_walked(version, codec):
    """All values are counted, whatever page layout the library writes."""
    values = pa.array([f"{i % 50}" for i in range(10_000)])
    out = io.BytesIO()
    options = {"data_page_size": 100, "data_page_version": version, "compression": codec}
    pq.write_table(pa.table({"a": values}), out, write_batch_size=100, **options)
    column = pq.read_metadata(out).row_group(0).column(0)
    start = column.dictionary_page_offset
    chunk = out.getvalue()[start : start + column.total_compressed_size]
    dictionary, *pages = walk_pages(chunk, 10_000)
    assert (dictionary.kind, dictionary.values) == (2, 50)
    assert len(pages) > 10
    assert sum(page.values for page in pages) == 10_000


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd"])
def test_column_chunks_are_where_pyarrow_finds_them(codec):
    """The footer has dictionaries, statistics, lists, an empty row group and several row groups."""
    lists = pa.array([[1, 2], [], [3]], SAMPLES.field("response_tokens").type)
    table = samples_with(3, response_tokens=lists)
    out = io.BytesIO()
    with pq.ParquetWriter(out, SAMPLES, compression=codec, write_page_index=True) as writer:
        for rows in (3, 0, 2):
            writer.write_table(table.slice(0, rows).cast(SAMPLES))
    metadata = pq.read_metadata(out)
    found = stored_chunks(footer_of(out.getvalue()), metadata.num_columns)
    for g, chunks in enumerate(found):
        for i, chunk in enumerate(chunks):
            column = metadata.row_group(g).column(i)
            is_there = column.has_dictionary_page
            start = column.dictionary_page_offset if is_there else column.data_page_offset
            place = (chunk.values, chunk.offset, chunk.length)
            assert place == (column.num_values, start, column.total_compressed_size)
            if column.statistics is not None and column.statistics.has_null_count:
                assert chunk.statistics[_NULLS] == column.statistics.null_count
            assert chunk.has_index == (chunk.values > 0)
            assert chunk.codec == {"none": 0, "snappy": 1, "gzip": 2, "zstd": 6}[codec]


def footer_of(content: bytes) -> bytes:
    return content[-8 - int.from_bytes(content[-8:-4], "little") :]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # The codec of column `id`, 6, becomes 61.
        (b"\x19\x18\x02id\x15\x0c", b"\x19\x18\x02id\x15\x7a"),
        # A list column's two repetition-level counts, 2 and 4, become one count, 514.
        (b"\x29\x26\x04\x08", b"\x29\x16\x84\x08"),
    ],
)
def test_footers_that_end_the_process_in_pyarrow_raise_an_error(right, wrong):
    lists = pa.array([[1, 2, 3], [4, 5, 6]], SAMPLES.field("response_tokens").type)
    store, file = stored(samples_with(2, response_tokens=lists), "samples")
    content = store.read("file")
    assert content.count(right) == 1
    content = content.replace(right, wrong)
    place = file.footer._replace(sha256=sha256(footer_of(content)))
    forged = replace(file, data=replace(file.data, sha256=sha256(content)), footer=place)
    refused(MemoryStore({"file": content}), forged, SAMPLES, "its columns are not as expected")


@pytest.mark.parametrize(
    "footer",
    [
        bytes([0x49, 0x1C, 0x19, 0x0C, 0, 0]),  # a row group without columns
        bytes([0x49, 0x0C, 0x09, 0x08, 0x0C, 0]),  # the row groups twice
        bytes([0x49, 0x15, 0, 0]),  # row groups that are numbers
        bytes([0x49, 0x1C, 0x19, 0x1C, 0x25, 0, 0, 0, 0]),  # a column without metadata
        bytes([0x49, 0xFC, 0xFF, 0xFF, 0xFF, 0x0F]),  # a list longer than the footer
        bytes([0x4B, 0]),  # a map
        b"\x19\x1c" * 1000,
        b"",
    ],
)
def test_malformed_footers_are_refused(footer):
    with pytest.raises(ValueError, match=r"row group|column|twice|list|end|deep|type"):
        stored_chunks(footer, 1)


PAGE = bytes([0x15, 0, 0x15, 0x10, 0x15, 0x10, 0x2C, 0x15, 0x02, 0x15, 0, 0, 0]) + bytes(8)


def test_a_page_header_is_parsed():
    assert list(walk_pages(PAGE, 1)) == [Page(0, 8, 8, 1, 0, 13)]


@pytest.mark.parametrize(
    "chunk",
    [
        PAGE[:-1],
        PAGE + b"\0",
        PAGE + PAGE,
        PAGE[:5],
        bytes([0x15, 0x0F]) + PAGE[2:],  # a negative type
        bytes([0x15, 0x02]) + PAGE[2:],  # an index page
        PAGE[:3] + bytes([0x0F]) + PAGE[4:],  # a negative size
        b"\x1c" * 1000,
        b"\x15" + b"\xff" * 1000,
        b"\x19\xfc" + b"\xff" * 1000,
        b"",
    ],
)
def test_malformed_page_headers_are_refused(chunk):
    with pytest.raises((ValueError, IndexError)):
        list(walk_pages(chunk, 1))


def test_a_footer_that_claims_long_lists_is_refused():
    """A footer of a hundred bytes claims to contain a million row groups."""
    samples = make_samples()
    store = MemoryStore()
    sealed_r3(store, samples)
    table, file = stored(samples_with(), "samples")
    content = table.objects["file"]
    schema = bytes([0x15, 4, 0x19, 0x1C, 0x15, 0, 0x15, 0x48, 1]) + b"s" + bytes([0x15, 0, 0])
    claim = bytes([0x16, 0, 0x19, 0x1C, 0x19, 0xFC]) + b"\xbf\x84\x3d" + bytes(20)
    footer = schema + claim
    footer += len(footer).to_bytes(4, "little") + b"PAR1"
    end = file.footer.offset
    content = content[:end] + footer
    place = file.footer._replace(length=len(footer), sha256=sha256(footer))
    data = DataFile("file", len(content), sha256(content))
    forged = TraceFile(data, file.role, place, file.leaves, file.row_groups)
    refused(MemoryStore({"file": content}), forged, SAMPLES, "Invalid data; remake the file")
