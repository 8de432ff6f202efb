"""Format versions: which are refused, and which columns older minor versions lack."""

from unittest.mock import patch

import pyarrow as pa
import pytest

from pipeline.run.commit import new_write_id
from pipeline.traces import TraceError
from pipeline.traces.format.chunks import TraceFile, read_table
from pipeline.traces.format.schema import MANIFEST, SAMPLES, check_format
from pipeline.traces.write.files import FileWriter


@pytest.mark.parametrize(
    "version",
    [
        *("2.0", "12.0", "0.1", None, "x", 1.0, "1", "1.", ".1", "1.1.1", "1.01", "01.1", "1.x"),
        *("1.1 ", "1.1\n", " 1.1", "+1.1", "-1.1", "1.\u0661", "\u0661.1", "1.\u00b2"),
        "1." + "9" * 5_000,
    ],
)
def test_other_major_versions_and_invalid_versions_are_refused(version):
    with pytest.raises(TraceError, match="format version"):
        check_format(version, "file")


@pytest.mark.parametrize(("version", "minor"), [("1.0", 0), ("1.1", 1), ("1.9", 9), ("1.10", 10)])
def test_every_minor_version_is_read(version, minor):
    assert check_format(version, "file") == minor


LATER = ("branch_of", "part_digests", "not_trained")
ROW = {"id": "a", "group": "g", "prompt_id": "p", "token_digest": "0" * 64}
ROW |= dict.fromkeys(("policy_version", "prompt_length", "response_length", "rows_total"), 1)
ROW |= {"samples": {"file": 0, "row": 0}, "branch_of": "b", "not_trained": "c"}


def written(store, version: str, schema: pa.Schema) -> TraceFile:
    """Write a file with two manifest rows and these columns, in a given format version."""
    table = pa.Table.from_pylist([ROW, ROW], MANIFEST).select(schema.names)
    with patch("pipeline.traces.format.schema.FORMAT", version):
        key = f"{new_write_id()}.parquet"
        with FileWriter(store, key, "manifest", schema) as writer:
            writer.write_table(table)
            return writer.finish()


def without(schema: pa.Schema, *names: str) -> pa.Schema:
    return pa.schema([field for field in schema if field.name not in names])


def test_columns_of_a_later_version_are_null(store):
    old = written(store, "1.0", without(MANIFEST, *LATER))
    rows = read_table(store, old, MANIFEST).to_pylist()
    assert [[row[name] for name in LATER] for row in rows] == [[None] * 3] * 2
    assert [row["id"] for row in rows] == ["a", "a"]
    only = pa.schema([MANIFEST.field("not_trained")])
    assert read_table(store, old, only)["not_trained"].to_pylist() == [None, None]


@pytest.mark.parametrize("name", LATER)
def test_a_file_that_lacks_a_column_of_its_version_is_refused(store, name):
    file = written(store, "1.1", without(MANIFEST, name))
    with pytest.raises(TraceError, match=f"no column {name}; found"):
        read_table(store, file, MANIFEST)


def test_a_column_of_the_first_version_must_be_present(store):
    old = written(store, "1.0", without(MANIFEST, *LATER, "reward"))
    with pytest.raises(TraceError, match="no column reward; found"):
        read_table(store, old, MANIFEST)


def test_the_manifest_has_the_columns_of_samples_up_to_branch_of():
    assert [name for name in SAMPLES.names if name in MANIFEST.names][-1] == "branch_of"
