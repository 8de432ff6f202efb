"""Prompts: they are read from Parquet files in verl's layout, checked, tokenised and staged.

verl's file                                     staged table
prompt: list of {role, content}         ──►     messages (JSON), token_ids (chat template applied)
data_source                             ──►     data_source
reward_model: {ground_truth, ...}       ──►     ground_truth (JSON)
extra_info (may be absent)              ──►     extra_info (JSON or null)
                                                prompt_id: row number of the staged table
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.tree import Data
from pipeline.errors import InputError
from pipeline.inputs.fetch import local_file
from pipeline.inputs.tokenizer import ChatTokenizer
from pipeline.store.schemes import REMOTE_URI

_MAGIC = b"PAR1"
"""The first bytes of a Parquet file."""

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.int64()),
        ("messages", pa.string()),
        ("token_ids", pa.list_(pa.uint32())),
        ("data_source", pa.string()),
        ("ground_truth", pa.string()),
        ("extra_info", pa.string()),
    ]
)


@dataclass(frozen=True)
class PromptTable:
    """Prompts, ready to be staged."""

    table: pa.Table
    """One row per prompt, in the layout SCHEMA."""
    dropped: int
    """Number of prompts left out because they are longer than max_prompt_length."""
    cut: int
    """Number of prompts cut to max_prompt_length tokens."""
    longest: int
    """Number of tokens in the longest prompt in the files, before prompts are dropped or cut."""

    def to_parquet(self) -> bytes:
        """Return the content of the staged file."""
        sink = io.BytesIO()
        pq.write_table(self.table, sink, compression="zstd")
        return sink.getvalue()


@dataclass(frozen=True)
class Row:
    """A checked prompt from a file."""

    file: str
    """The file's name as given in the settings."""
    number: int
    """Number of the row in the file, counted from 0."""
    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: str
    extra_info: str | None

    @property
    def where(self) -> str:
        """Text that names the row and the file, for use in messages."""
        return f"row {self.number} of {self.file}"


def read_rows(key: str, files: str | Sequence[str], data: Data) -> list[Row]:
    """Read and check the prompts of `data.train_files` or `data.val_files`.

    Args:
        key: The setting that names the files.
        files: One file or several.
        data: The `data` section of the settings, which names the columns.

    Raises:
        InputError: A file or column is missing, a file has no rows, or rows do not have verl's
            layout. The error lists the problems with all files.
    """
    problems: list[str] = []
    rows: list[Row] = []
    for name in [files] if isinstance(files, str) else files:
        try:
            rows += _read_file(key, name, data)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return rows


def tokenise_rows(
    key: str,
    rows: Sequence[Row],
    data: Data,
    tokenizer: ChatTokenizer,
    positions: int | None = None,
) -> PromptTable:
    """Apply the chat template, and return the table of prompts to stage.

    Args:
        key: The setting that names the files.
        rows: The checked prompts.
        data: The `data` section of the settings, which limits the lengths of prompts.
        tokenizer: The model's tokenizer.
        positions: The maximum length of the model's samples, in tokens; None if unknown.

    Raises:
        InputError: The chat template refuses a prompt, or a prompt is longer than
            `data.max_prompt_length` and is neither filtered nor cut.
    """
    tokens = _tokenise(key, rows, tokenizer)
    lengths = [len(ids) for ids in tokens]
    fitting = [index for index, length in enumerate(lengths) if length <= data.max_prompt_length]
    overlong = len(rows) - len(fitting)
    keep = fitting if data.filter_overlong_prompts else list(range(len(rows)))
    if overlong and not data.filter_overlong_prompts and data.truncation == "error":
        worst = lengths.index(max(lengths))
        fix = f"set it to {lengths[worst]}, "
        if positions is not None and lengths[worst] + data.max_response_length > positions:
            fix = (
                f"with data.max_response_length={data.max_response_length} the model's {positions} "
                "positions are too few for a prompt of this length: shorten the prompts, "
            )
        raise InputError(
            [
                f"data.max_prompt_length: {overlong} of {len(rows)} prompts of {key} have more "
                f"than {data.max_prompt_length} tokens; the longest, {rows[worst].where}, has "
                f"{lengths[worst]}; {fix}drop them with "
                "data.filter_overlong_prompts=True, or cut them with data.truncation=left"
            ]
        )
    if not keep:
        raise InputError(
            [
                f"{key}: all {len(rows)} prompts have more than data.max_prompt_length="
                f"{data.max_prompt_length} tokens and were dropped; set it to {min(lengths)} or "
                "more"
            ]
        )
    return PromptTable(
        table=_table([rows[i] for i in keep], [_cut(tokens[i], data) for i in keep]),
        dropped=len(rows) - len(keep),
        cut=len(keep) - len(fitting),
        longest=max(lengths),
    )


def vocabulary_problems(key: str, table: PromptTable, hf_config: Mapping[str, Any]) -> list[str]:
    """Return a problem if prompts contain tokens that the model's vocabulary lacks.

    Args:
        key: The setting that names the prompt files.
        table: The tokenised prompts.
        hf_config: The model's config.json.
    """
    size = hf_config.get("vocab_size")
    largest = max(max(ids) for ids in table.table["token_ids"].to_pylist())
    if not isinstance(size, int) or largest < size:
        return []
    return [
        f"actor_rollout_ref.model.path: a prompt of {key} has token id {largest}, but the model's "
        f"vocab_size is {size}, so the tokenizer belongs to a different model; put the correct "
        "tokenizer into the model's folder"
    ]


def filter_notes(truncation: str, *tables: PromptTable | None) -> Iterator[str]:
    """Yield notes on dropped and cut prompts.

    Args:
        truncation: The setting `data.truncation`.
        tables: The tables of training prompts and validation prompts. The second is None if the run
            does not validate.
    """
    for key, table in zip(("data.train_files", "data.val_files"), tables, strict=True):
        if table is not None and table.dropped:
            yield (
                f"{key}: dropped {table.dropped} prompts longer than data.max_prompt_length; "
                f"{table.table.num_rows} are left (data.filter_overlong_prompts=True)"
            )
        if table is not None and table.cut:
            yield (
                f"{key}: cut {table.cut} prompts to data.max_prompt_length, at the "
                f"{truncation} (data.truncation)"
            )


def _cut(tokens: list[int], data: Data) -> list[int]:
    """Cut a prompt to max_prompt_length tokens.

    With truncation `middle` and an odd limit, one more token is kept from the end than from the
    beginning.
    """
    most = data.max_prompt_length
    if len(tokens) <= most:
        return tokens
    if data.truncation == "left":
        return tokens[-most:]
    if data.truncation == "right":
        return tokens[:most]
    begin = most // 2
    return tokens[:begin] + tokens[begin - most :]


def _read_file(key: str, name: str, data: Data) -> list[Row]:
    path = local_file(key, name)
    _check_kind(key, name, path, data)
    try:
        file = pq.ParquetFile(path)
        found = file.schema_arrow.names
        needed = {"data.prompt_key": data.prompt_key, "data.reward_fn_key": data.reward_fn_key}
        missing = [
            f"{key}: {name} has no column {column!r} (found {', '.join(found)}); add it, or set "
            f"{setting} to the name of the right column"
            for setting, column in needed.items()
            if column not in found
        ]
        if "reward_model" not in found:
            missing.append(
                f"{key}: {name} has no column 'reward_model' (found {', '.join(found)}); add it "
                'as {"style": "rule", "ground_truth": ...}, as in verl'
            )
        if missing:
            raise InputError(missing)
        columns = [*needed.values(), "reward_model"]
        columns += ["extra_info"] if "extra_info" in found else []
        records = file.read(columns=columns).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            [f"{key}: {name} cannot be read as Parquet: {error}; fetch or write the file again"]
        ) from error
    if not records:
        raise InputError([f"{key}: {name} has no rows; write at least one prompt into it"])
    return _checked_rows(key, name, data, records)


def _check_kind(key: str, name: str, path: Path, data: Data) -> None:
    """Raise InputError unless the file exists and begins like a Parquet file."""
    if path.is_dir():
        files = sorted(str(Path(name, file.name)) for file in path.glob("*.parquet"))
        shown = ",".join([*files[:3], *(["..."] if len(files) > 3 else [])])
        fix = f"name its files: '{key}=[{shown}]'" if files else "it contains no *.parquet file"
        raise InputError([f"{key}: {name} is a folder; {fix}"])
    if not path.is_file():
        several = f"; give several files as a list: '{key}=[a.parquet,b.parquet]'"
        raise InputError(
            [
                f"{key}: no file {name} (from {Path.cwd()}); give the path or {REMOTE_URI} of a "
                f"Parquet file in verl's layout{several if set(name) & set('*?,[') else ''}"
            ]
        )
    with path.open("rb") as source:
        if source.read(len(_MAGIC)) != _MAGIC:
            raise InputError(
                [
                    f"{key}: {name} is not a Parquet file; create one with the columns "
                    f"{data.prompt_key}, {data.reward_fn_key} and reward_model (docs/config.md)"
                ]
            )


def _checked_rows(key: str, name: str, data: Data, records: list[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    wrong: list[str] = []
    for number, record in enumerate(records):
        try:
            rows.append(_row(name, number, record, data))
        except ValueError as error:
            wrong.append(f"row {number}: {error}")
    if wrong:
        more = f" ({len(wrong)} of {len(records)} rows are invalid)" if len(wrong) > 1 else ""
        raise InputError([f"{key}: {name}, {wrong[0]}{more}"])
    return rows


def _row(file: str, number: int, record: dict[str, Any], data: Data) -> Row:
    """Check a row and return it. Raises a ValueError that describes the problem."""
    source = record[data.reward_fn_key]
    if not isinstance(source, str):
        raise ValueError(f"column {data.reward_fn_key!r} has {source!r}, expected text")
    reward_model = record["reward_model"]
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise ValueError(
            f"column 'reward_model' has {_short(reward_model)}, expected a struct with ground_truth"
        )
    if reward_model["ground_truth"] is None:
        raise ValueError(
            "column 'reward_model' has a null ground_truth, expected the value that the reward "
            "function compares the response with; write it into the row, or remove the row"
        )
    extra_info = record.get("extra_info")
    return Row(
        file,
        number,
        _messages(data.prompt_key, record[data.prompt_key]),
        source,
        _json("reward_model.ground_truth", reward_model["ground_truth"]),
        None if extra_info is None else _json("extra_info", extra_info),
    )


def _messages(column: str, value: Any) -> list[dict[str, Any]]:
    expected = (
        f"column {column!r} has {_short(value)}, expected a list of messages with the "
        'texts role and content; write [{"role": "user", "content": "1+1="}]'
    )
    if not isinstance(value, list) or not value:
        raise ValueError(expected)
    messages = []
    for message in value:
        if not isinstance(message, dict):
            raise ValueError(expected)
        # In Parquet, every message has the keys of all messages; an absent value is null.
        given = {name: part for name, part in message.items() if part is not None}
        if not isinstance(given.get("role"), str) or not isinstance(given.get("content"), str):
            raise ValueError(expected)
        messages.append(given)
    return messages


def _json(column: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"column {column!r} has {_short(value)}, not JSON: {error}") from error


def _tokenise(key: str, rows: Sequence[Row], tokenizer: ChatTokenizer) -> list[list[int]]:
    texts = []
    for row in rows:
        try:
            texts.append(tokenizer.render(row.messages))
        except ValueError as error:
            raise InputError([f"{key}: {row.where}: {error}"]) from error
    tokens = tokenizer.encode(texts)
    for row, ids in zip(rows, tokens, strict=True):
        if not ids:
            raise InputError([f"{key}: {row.where}: the prompt has no tokens; write text into it"])
    return tokens


def _table(rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> pa.Table:
    def column(value: Callable[[Row], str | None]) -> list[str | None]:
        return [value(row) for row in rows]

    return pa.table(
        {
            "prompt_id": range(len(rows)),
            "messages": column(lambda row: json.dumps(row.messages, ensure_ascii=False)),
            "token_ids": tokens,
            "data_source": column(lambda row: row.data_source),
            "ground_truth": column(lambda row: row.ground_truth),
            "extra_info": column(lambda row: row.extra_info),
        },
        schema=SCHEMA,
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
