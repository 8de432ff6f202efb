"""Routes files are written without a Parquet library, and a Parquet library reads them."""

import hashlib
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.traces import Geometry
from pipeline.traces.format.chunks import describe, read_table
from pipeline.traces.format.codec import PLANES, stored_lengths
from pipeline.traces.format.schema import routes_schema
from pipeline.traces.write.routes_file import RoutesFile, Segments
from tests.memory_store import MemoryStore
from tests.samples import R3

GEOMETRY = Geometry(16, 1, (0, 12_345))
BITS = st.one_of(st.none(), st.binary(min_size=1, max_size=9))


def segments_of(rows: list[tuple[str, int, bytes | None]]) -> tuple[Segments, list[list[bytes]]]:
    """Return a row group of segments (owner, number of tokens, validity) and its sets as bytes."""
    rng = np.random.default_rng(len(rows))
    owners, tokens, validity = zip(*rows, strict=True)
    sets_LNK = rng.integers(0, 16, (len(GEOMETRY.layers), sum(tokens), 1), np.uint8)
    ends = np.cumsum(tokens).tolist()
    data = [
        [sets_NK[end - n : end].tobytes() for n, end in zip(tokens, ends, strict=True)]
        for sets_NK in sets_LNK
    ]
    return Segments(owners, range(len(rows)), tokens, validity, sets_LNK), data


@given(
    st.lists(
        st.lists(st.tuples(st.text(), st.integers(0, 400), BITS), min_size=1, max_size=300),
        max_size=3,
    ),
    st.sampled_from(["zstd", "lz4", "none"]),
    st.sampled_from(["gaps-uint8", "ids-uint8", "gaps-planes", "ids-planes"]),
)
def test_a_parquet_library_reads_the_file(groups, compression, stored):
    """The library reads any owners, bits and lengths, in any number of row groups."""
    store = MemoryStore()
    made = [segments_of(rows) for rows in groups]
    with RoutesFile(store, "routes", GEOMETRY, R3, compression=compression) as file:
        file._coding = stored
        for segments, _ in made:
            file.write(segments)
        written = file.finish()
    data = store.read("routes")
    assert pq.ParquetFile(io.BytesIO(data)).num_row_groups == len(groups)
    table = pq.read_table(io.BytesIO(data))
    assert table.schema.equals(routes_schema(GEOMETRY))
    rows = [row for of_group in groups for row in of_group]
    assert table["owner"].to_pylist() == [owner for owner, _, _ in rows]
    assert table["token_start"].to_pylist() == [i for group in groups for i in range(len(group))]
    assert table["tokens"].to_pylist() == [tokens for _, tokens, _ in rows]
    assert table["validity"].to_pylist() == [bits for _, _, bits in rows]
    for number, layer in enumerate(("layer_00000", "layer_12345")):
        # With K = 1, all codings of a row are the same byte.
        expected = [
            [b"".join(coded[number]), *[b""] * (len(coded[number]) - 1)]
            if stored in PLANES.values()
            else coded[number]
            for _, coded in made
        ]
        assert table[layer].to_pylist() == [data for of_group in expected for data in of_group]
    # The locations and digests that were computed while writing equal those from the footer.
    assert written == describe(data, written.data, "routes")
    assert written.data.sha256 == hashlib.sha256(data).hexdigest()
    assert read_table(store, written, routes_schema(GEOMETRY), geometry=GEOMETRY).equals(table)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=400))
def test_lengths_have_the_form_that_parquet_libraries_write(lengths):
    """The bytes equal pyarrow's DELTA_BINARY_PACKED encoding of the same numbers."""
    written = io.BytesIO()
    column = np.array(lengths, np.int32)
    table = pa.table({"n": column}, schema=pa.schema([pa.field("n", pa.int32(), nullable=False)]))
    pq.write_table(
        table,
        written,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        column_encoding={"n": "DELTA_BINARY_PACKED"},
        store_schema=False,
    )
    assert stored_lengths(lengths) in written.getvalue()


def test_no_segments_make_an_empty_file():
    store = MemoryStore()
    with RoutesFile(store, "routes", GEOMETRY, R3) as file:
        written = file.finish()
    assert (written.rows, written.row_groups) == (0, ())
    assert len(pq.read_table(io.BytesIO(store.read("routes")))) == 0


def test_an_error_leaves_no_object():
    store = MemoryStore()

    def write():
        with RoutesFile(store, "routes", GEOMETRY, R3) as file:
            file.write(segments_of([("a", 3, None)])[0])
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert list(store.list("")) == []
