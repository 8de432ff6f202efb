"""Columns whose Parquet types differ from those on the page are refused, not cast."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.traces import Geometry, TraceError
from pipeline.traces.format.columns import check_columns
from pipeline.traces.format.schema import MANIFEST, SAMPLES, routes_schema

ROUTES = routes_schema(Geometry(16, 4, (1, 2)))
SPAN = [("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())]

WRONG = {
    "int64 for int32": ("rows_total", pa.int64()),
    "int8 for int32": ("rows_total", pa.int8()),
    "uint32 for int32": ("policy_version", pa.uint32()),
    "int32 for int64": ("seed", pa.int32()),
    "a time for int64": ("seed", pa.timestamp("us")),
    "a float for a double": ("reward", pa.float32()),
    "a string for a double": ("reward", pa.string()),
    "a double for a float": ("logprobs", pa.list_(pa.float64())),
    "bytes for a string": ("id", pa.binary()),
    "a decimal for an integer": ("response_length", pa.decimal128(9)),
    "signed tokens": ("prompt_tokens", pa.list_(pa.int32())),
    "wide tokens": ("prompt_tokens", pa.list_(pa.uint64())),
    "not a list": ("response_tokens", pa.uint32()),
    "one list too many": ("loss_mask", pa.list_(pa.list_(pa.bool_()))),
    "numbers for bools": ("loss_mask", pa.list_(pa.int32())),
    "a wider field": (
        "version_spans",
        pa.list_(pa.struct([("version", pa.int64()), *SPAN[1:]])),
    ),
    "one field fewer": ("version_spans", pa.list_(pa.struct(SPAN[:2]))),
    "one field more": ("version_spans", pa.list_(pa.struct([*SPAN, ("more", pa.int32())]))),
    "not a group": ("version_spans", pa.list_(pa.int32())),
}


def metadata_of(schema: pa.Schema) -> pq.FileMetaData:
    out = io.BytesIO()
    pq.write_table(schema.empty_table(), out)
    return pq.read_metadata(out)


def changed(schema: pa.Schema, column: str, type_: pa.DataType) -> pa.Schema:
    return schema.set(schema.get_field_index(column), pa.field(column, type_))


@pytest.mark.parametrize("case", WRONG)
def test_different_types_are_refused(case):
    column, type_ = WRONG[case]
    with pytest.raises(TraceError, match=rf"F: its column {column}.*(expected|does not define)"):
        check_columns(metadata_of(changed(SAMPLES, column, type_)), SAMPLES, "F")


def test_text_for_coded_sets_is_refused():
    with pytest.raises(TraceError, match=r"layer_00002 is BYTE_ARRAY \(STRING\), expected BYTE"):
        check_columns(metadata_of(changed(ROUTES, "layer_00002", pa.string())), ROUTES, "F")


@pytest.mark.parametrize("schema", [SAMPLES, MANIFEST, ROUTES])
def test_our_types_are_accepted(schema):
    check_columns(metadata_of(schema), schema, "F")


@pytest.mark.parametrize(
    ("column", "type_"),
    [
        ("id", pa.large_string()),
        ("group", pa.dictionary(pa.int32(), pa.string())),
        ("prompt_tokens", pa.large_list(pa.uint32())),
    ],
)
def test_types_that_only_arrow_distinguishes_are_accepted(column, type_):
    """The files are the same, except for Arrow's metadata."""
    check_columns(metadata_of(changed(SAMPLES, column, type_)), SAMPLES, "F")


def test_other_columns_are_left_to_the_caller():
    """These are columns from a later minor version, and columns that an earlier minor version
    lacks."""
    check_columns(metadata_of(SAMPLES.append(pa.field("new", pa.date32()))), SAMPLES, "F")
    check_columns(metadata_of(SAMPLES.remove(0)), SAMPLES, "F")
