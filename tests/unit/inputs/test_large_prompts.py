"""Prompt files of any size and layout are read in batches, and unread columns are reported."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.inputs.prompts import prompt_file
from pipeline.inputs.prompts.prompt_file import CHUNK_ROWS, PromptFile
from pipeline.run.prompt_table import SCHEMA, StoredPrompts
from tests.unit.inputs.small_inputs import check, check_error, load, prepare, the_error, verl_rows

ROWS = 2 * CHUNK_ROWS + 3


def rows_of(table: StoredPrompts) -> list[dict]:
    return table.read(range(table.rows), SCHEMA.names[1:]).to_pylist()


def write(path, table: pa.Table, **options) -> None:
    pq.write_table(table, path, **options)


def as_type(name: str, kind: pa.DataType):
    """Return a function that casts a column of the prompts."""

    def cast(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(name)
        return table.set_column(place, name, table[name].cast(kind))

    return cast


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda table: table, {"row_group_size": 1 << 20}),
        (lambda table: table, {"row_group_size": 1}),
        (lambda table: table, {"row_group_size": 7, "compression": "gzip"}),
        (lambda table: table, {"use_dictionary": False, "data_page_version": "2.0"}),
        (as_type("data_source", pa.large_string()), {}),
        (as_type("data_source", pa.dictionary(pa.int32(), pa.string())), {}),
        (as_type("prompt", pa.large_list(pa.struct([("role", pa.large_string()),
                                                    ("content", pa.large_string())]))), {}),
    ],
)  # fmt: skip
def test_the_form_of_a_file_does_not_matter(settings, change, options):
    """The staged rows are the same for every size of row groups and every type of text."""
    path = settings.parent / "train.parquet"
    table = pa.Table.from_pylist(verl_rows(ROWS))
    write(path, table)
    expected = rows_of(check(settings).prompts.prompts)
    write(path, change(table), **options)
    inputs = check(settings)
    assert rows_of(inputs.prompts.prompts) == expected
    assert [row["prompt_id"] for row in expected] == list(range(ROWS))


def test_a_chunk_and_a_batch_are_short_if_rows_are_large(settings, monkeypatch):
    """The limits are in characters and bytes, and a row that exceeds them ends its chunk."""
    monkeypatch.setattr(prompt_file, "CHUNK_CHARACTERS", 5_000)
    monkeypatch.setattr(prompt_file, "_BATCH_BYTES", 10_000)
    rows = verl_rows(40)
    for number, row in enumerate(rows):
        row["reward_model"]["ground_truth"] = f"{number}" * (20_000 if number == 5 else 600)
    path = settings.parent / "train.parquet"
    write(path, pa.Table.from_pylist(rows), row_group_size=40, use_dictionary=False)
    file = PromptFile("data.train_files", str(path), load(settings).data)
    sizes = [[row.characters for row in chunk] for chunk in file.chunks()]
    assert sum(map(len, sizes)) == 40
    assert all(sum(chunk[:-1]) < 5_000 for chunk in sizes)
    assert max(map(len, sizes)) > 1
    assert max(batch.num_rows for batch in file._batches(file._columns())) < 10
    staged = prepare(load(settings))
    table = StoredPrompts.of(staged.store, staged.description.inputs.prompts)
    (row,) = table.read([5], ["ground_truth"]).to_pylist()
    assert row == {"prompt_id": 5, "ground_truth": f'"{"5" * 20_000}"'}


def test_prompts_with_the_same_messages_have_the_same_tokens(settings, monkeypatch):
    """Tokens are kept for equal prompts, up to a number of characters."""
    rows = [row for row in verl_rows(3) for _ in range(200)]
    write(settings.parent / "train.parquet", pa.Table.from_pylist(rows))
    few = rows_of(check(settings).prompts.prompts)
    monkeypatch.setattr("pipeline.inputs.prompts.token_writer._KNOWN_CHARACTERS", 0)
    assert rows_of(check(settings).prompts.prompts) == few
    assert len({tuple(row["token_ids"]) for row in few}) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("images", [{"bytes": b"\x89PNG", "path": None}]),
        ("image", {"bytes": b"\x89PNG", "path": None}),
        ("videos", ["clip.mp4"]),
        ("audio", b"RIFF"),
    ],
)
def test_prompts_with_images_videos_or_audio_are_refused(settings, name, value):
    """One row is enough. Empty and null values are accepted."""
    rows = [row | {name: None} for row in verl_rows(10)]
    write(settings.parent / "train.parquet", pa.Table.from_pylist(rows))
    assert check(settings).prompt_count == 10
    rows[7][name] = value
    write(settings.parent / "train.parquet", pa.Table.from_pylist(rows))
    assert f"column {name!r}, but only text" in the_error(settings)
    if isinstance(value, list):
        rows[7][name] = []
        write(settings.parent / "train.parquet", pa.Table.from_pylist(rows))
        assert check(settings).notes == ()


def test_unread_columns_are_noted_when_prompts_are_staged(settings):
    """The note names all columns once, and those that make verl do something else."""
    rows = [row | {"level": 3, "tools": None, "agent_name": ""} for row in verl_rows(10)]
    write(settings.parent / "train.parquet", pa.Table.from_pylist(rows))
    (note,) = check(settings).notes
    assert note.endswith("train.parquet: not read: columns level, tools, agent_name")
    rows[9] |= {"agent_name": "tool_agent"}
    write(settings.parent / "train.parquet", pa.Table.from_pylist(rows))
    (note,) = prepare(load(settings)).notes
    assert "not read: columns level, tools, agent_name; verl may use agent_name to" in note
    assert check(settings).notes == (), "the prompts are staged already"


def test_only_damage_is_repaired_by_fetching_the_file_again(settings, monkeypatch):
    """Other errors name their own fix, or the system's reason."""
    path = settings.parent / "train.parquet"
    content = bytearray(path.read_bytes())
    content[10:40] = bytes(30)
    path.write_bytes(content)
    (problem,) = check_error(settings)
    assert problem.endswith("fetch or write the file again")
    for error, fix in (
        (pa.ArrowNotImplementedError("lzo"), "that pyarrow reads"),
        (pa.ArrowMemoryError("2 GiB"), "this machine's memory"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
    ):

        def fails(*_, error=error, **__):
            raise error

        monkeypatch.setattr(pq.ParquetFile, "iter_batches", fails)
        (problem,) = check_error(settings)
        assert problem.endswith(fix)
