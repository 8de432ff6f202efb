"""Prompt files in verl's layout: problems with files and rows are reported.

The staged table contains the tokens that transformers' own tokenizer produces.
"""

import io
import json
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.stage import prepare
from pipeline.run.commit import read_data
from pipeline.run.prompt_table import SCHEMA
from tests.unit.inputs.small_inputs import (
    check,
    check_error,
    load,
    the_error,
    verl_rows,
    write_prompts,
)


def column(inputs: CheckedInputs, name: str) -> list[Any]:
    """Return a column of the training prompts."""
    table = inputs.prompts
    return table.prompts.read(range(table.rows), SCHEMA.names[1:])[name].to_pylist()


def test_the_staged_table_contains_tokens_and_columns(settings, model):
    """Token ids are the same as those from transformers' AutoTokenizer with generation prompt."""
    run = prepare(load(settings))
    data = read_data(run.store, run.description.inputs.prompts)
    table = pq.read_table(io.BytesIO(data))
    assert table.schema.equals(SCHEMA)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for number, row in enumerate(table.to_pylist()):
        messages = verl_rows(10)[number]["prompt"]
        assert row["prompt_id"] == number
        assert json.loads(row["messages"]) == messages
        assert row["token_ids"] == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert (row["data_source"], json.loads(row["ground_truth"])) == ("add", str(2 * number))
        assert json.loads(row["extra_info"]) == {"index": number}


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_the_error_about_a_missing_column_names_the_others(settings, column):
    rows = [{k: v for k, v in row.items() if k != column} for row in verl_rows(10)]
    path = write_prompts(settings.parent / "train.parquet", rows)
    there = ", ".join(rows[0])
    assert the_error(settings).startswith(
        f"data.train_files: {path} has no column {column!r} (found {there}); add it"
    )


def test_columns_may_have_different_names(settings):
    rows = [{**row, "messages": row["prompt"], "prompt": "x"} for row in verl_rows(10)]
    write_prompts(settings.parent / "train.parquet", rows)
    assert check(settings, "data.prompt_key=messages").prompt_count == 10


def test_extra_info_may_be_missing(settings):
    rows = [{k: v for k, v in row.items() if k != "extra_info"} for row in verl_rows(10)]
    write_prompts(settings.parent / "train.parquet", rows)
    assert column(check(settings), "extra_info") == [None] * 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "1 + 1"}, "row 0: column 'prompt' has '1 + 1', expected a list of messages "
         'with the texts role and content; write [{"role": "user", "content": "1+1="}] '
         "(2 of 2 rows are invalid)"),
        ({"prompt": []}, "row 0: column 'prompt' has [], expected a list"),
        ({"prompt": [{"role": "user"}]}, "row 0: column 'prompt' has [{'role': 'user'}], "),
        ({"data_source": 1}, "row 0: column 'data_source' has 1, expected text"),
        ({"reward_model": {"style": "rule"}}, "row 0: column 'reward_model' has {'style': "
         "'rule'}, expected a struct with ground_truth"),
        ({"reward_model": {"ground_truth": None}}, "row 0: column 'reward_model' has a null "
         "ground_truth, expected the value that the reward function compares the response with; "
         "write it into the row, or remove the row"),
        ({"extra_info": {"raw": b"x"}}, "row 0: column 'extra_info' has {'raw': b'x'}, not "
         "JSON"),
    ],
)  # fmt: skip
def test_rows_in_a_different_layout_are_refused(settings, change, message):
    rows = [{**row, **change} for row in verl_rows(2)]
    path = write_prompts(settings.parent / "train.parquet", rows)
    assert f"data.train_files: {path}, {message}" in the_error(settings)


def test_an_empty_file_is_refused(settings):
    path = settings.parent / "train.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    assert the_error(settings) == (
        f"data.train_files: {path} has no rows; write at least one prompt into it"
    )


def test_missing_and_unreadable_files_are_shown_together(settings):
    problems = check_error(
        settings, "data.train_files=absent.parquet", f"data.val_files={settings}"
    )
    assert problems[0].startswith("data.train_files: no file absent.parquet (from ")
    assert problems[1] == (
        f"data.val_files: {settings} is not a Parquet file; create one with the columns prompt, "
        "data_source and reward_model (docs/config.md)"
    )


def test_a_damaged_parquet_file_is_refused(settings):
    """Here the message includes pyarrow's own text."""
    path = settings.parent / "train.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    problem = the_error(settings)
    assert problem.startswith(f"data.train_files: {path} cannot be read as Parquet: ")
    assert problem.endswith("; fetch or write the file again")


def test_the_error_about_a_folder_of_prompts_names_its_files(settings):
    folder = settings.parent / "prompts"
    folder.mkdir()
    key, found = "data.train_files", f"data.train_files={folder}"
    none = f"{key}: {folder} is a folder; it contains no *.parquet file"
    assert the_error(settings, found) == none
    names = [str(write_prompts(folder / f"{name}.parquet", verl_rows(4))) for name in "abcd"]
    assert the_error(settings, found) == (
        f"{key}: {folder} is a folder; name its files: '{key}={','.join(names[:3])},...]'"
    ).replace(f"={names[0]}", f"=[{names[0]}")
    assert check(settings, f"{key}=[{','.join(names)}]").prompt_count == 16


@pytest.mark.parametrize("name", ["a.parquet,b.parquet", "prompts/*.parquet"])
def test_several_files_in_one_text_are_refused(settings, name):
    assert the_error(settings, f"data.val_files={name}").endswith(
        "; give several files as a list: 'data.val_files=[a.parquet,b.parquet]'"
    )


def test_prompts_longer_than_the_models_positions_get_other_advice(settings):
    """A higher limit would not help, so the advice is to shorten the prompts."""
    rows = verl_rows(10)
    rows[3]["prompt"][0]["content"] = "1 + 1 " * 2000
    write_prompts(settings.parent / "train.parquet", rows)
    problem = the_error(settings)
    assert (
        "; with data.max_response_length=8 the model's 512 positions are too few for a prompt of "
        "this length: shorten the prompts, drop them with data.filter_overlong_prompts=True, or "
        "cut them with "
    ) in problem


def test_prompts_over_the_limit_are_refused_or_dropped(settings):
    """The error gives the number of such prompts, an example and both fixes.

    If the prompts are dropped, a note reports this.
    """
    rows = verl_rows(10)
    for number in (3, 7):
        rows[number]["prompt"][0]["content"] = "1 + 1 " * number
    path = write_prompts(settings.parent / "train.parquet", rows)
    limit = "data.max_prompt_length=20"
    problem = the_error(settings, limit)
    longest = int(problem.split("has ")[1].split(";")[0])
    assert problem == (
        "data.max_prompt_length: 2 of 10 prompts of data.train_files have more than 20 tokens; "
        f"the longest, row 7 of {path}, has {longest}; set it to {longest}, drop them with "
        "data.filter_overlong_prompts=True, or cut them with data.truncation=left"
    )
    assert check(settings, f"data.max_prompt_length={longest}").prompt_count == 10
    inputs = check(settings, limit, "data.filter_overlong_prompts=True")
    assert inputs.prompt_count == 8
    assert column(inputs, "prompt_id") == list(range(8))
    assert inputs.notes == (
        "data.train_files: dropped 2 prompts longer than data.max_prompt_length; 8 are left "
        "(data.filter_overlong_prompts=True)",
    )
    assert "all 10 prompts have more than data.max_prompt_length=2 " in the_error(
        settings, "data.max_prompt_length=2", "data.filter_overlong_prompts=True"
    )


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        ("left", lambda ids: ids[-7:]),
        ("right", lambda ids: ids[:7]),
        ("middle", lambda ids: ids[:3] + ids[-4:]),
    ],
)
def test_prompts_over_the_limit_are_cut_as_in_verl(settings, side, kept):
    """If the limit is odd, verl's `middle` keeps one more token from the end than from the
    start."""
    whole = column(check(settings), "token_ids")
    inputs = check(settings, "data.max_prompt_length=7", f"data.truncation={side}")
    assert min(map(len, whole)) > 7
    assert column(inputs, "token_ids") == [kept(ids) for ids in whole]
    assert inputs.notes == (
        f"data.train_files: cut 10 prompts to data.max_prompt_length, at the {side} "
        "(data.truncation)",
    )


def test_dropping_comes_before_cutting(settings):
    """As in verl, overlong prompts are dropped first, so none remains to be cut."""
    both = ("data.filter_overlong_prompts=True", "data.truncation=left")
    table = check(settings, "data.max_prompt_length=20", *both).prompts
    assert table.origin.cut == 0
    assert "were dropped" in the_error(settings, "data.max_prompt_length=7", *both)
