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
from pipeline.run.commit import read_data
from pipeline.run.prompt_table import SCHEMA
from tests.unit.inputs.small_inputs import (
    check,
    check_error,
    load,
    prepare,
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


def test_the_error_about_a_missing_column_names_the_others(settings):
    """A different column may hold the messages, and `extra_info` may be missing."""
    rows = [{"messages": row.pop("prompt"), **row} for row in verl_rows(10)]
    for row in rows:
        del row["extra_info"]
    write_prompts(settings.parent / "train.parquet", rows)
    assert f"'prompt' (found {', '.join(rows[0])})" in the_error(settings)
    assert column(check(settings, "data.prompt_key=messages"), "extra_info") == [None] * 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "1 + 1"}, "row 0: column 'prompt' has '1 + 1'"),
        ({"prompt": []}, "row 0: column 'prompt' has []"),
        ({"prompt": [{"role": "user"}]}, "row 0: column 'prompt' has [{'role': 'user'}], "),
        ({"data_source": 1}, "row 0: column 'data_source' has 1"),
        ({"reward_model": {"style": "rule"}}, "row 0: column 'reward_model' has {'style': "),
        ({"reward_model": {"ground_truth": None}}, "row 0: column 'reward_model' has a null "),
        ({"extra_info": {"raw": b"x"}}, "row 0: column 'extra_info' has {'raw': b'x'}"),
    ],
)
def test_rows_in_a_different_layout_are_refused(settings, change, message):
    rows = [{**row, **change} for row in verl_rows(2)]
    path = write_prompts(settings.parent / "train.parquet", rows)
    assert f"data.train_files: {path}, {message}" in the_error(settings)


def test_missing_and_unreadable_files_are_shown_together(settings):
    problems = check_error(
        settings, "data.train_files=absent.parquet", f"data.val_files={settings}"
    )
    assert problems[0].startswith("data.train_files: no file absent.parquet")
    assert problems[1].startswith(f"data.val_files: {settings} is not a Parquet file")


def test_prompts_over_the_limit_are_refused_or_dropped(settings):
    """The error gives the number of such prompts, an example and both fixes."""
    rows = verl_rows(10)
    for number in (3, 7):
        rows[number]["prompt"][0]["content"] = "1 + 1 " * number
    path = write_prompts(settings.parent / "train.parquet", rows)
    limit = "data.max_prompt_length=20"
    problem = the_error(settings, limit)
    longest = int(problem.split("has ")[1].split(";")[0])
    assert problem.startswith("data.max_prompt_length: 2 of 10 prompts")
    assert f"row 7 of {path}, has {longest}" in problem
    assert check(settings, f"data.max_prompt_length={longest}").prompt_count == 10
    inputs = check(settings, limit, "data.filter_overlong_prompts=True")
    assert inputs.prompt_count == 8
    assert column(inputs, "prompt_id") == list(range(8))
    assert "dropped 2 prompts" in inputs.notes[0]
    none = ("data.max_prompt_length=2", "data.filter_overlong_prompts=True")
    assert "all 10 prompts" in the_error(settings, *none)


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
    assert f"cut 10 prompts to data.max_prompt_length, at the {side}" in inputs.notes[0]


def test_dropping_comes_before_cutting(settings):
    """As in verl, overlong prompts are dropped first, so none remains to be cut."""
    both = ("data.filter_overlong_prompts=True", "data.truncation=left")
    table = check(settings, "data.max_prompt_length=20", *both).prompts
    assert table.origin.cut == 0
    assert "were dropped" in the_error(settings, "data.max_prompt_length=7", *both)
