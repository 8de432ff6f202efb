"""Prompt files: their columns, and their rows in chunks of bounded size."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.tree import Data
from pipeline.errors import InputError
from pipeline.inputs.fetch import local_file
from pipeline.store.schemes import REMOTE_URI

CHUNK_ROWS = 256
CHUNK_CHARACTERS = 4 << 20
"""Rows and characters after which a chunk ends."""
_BATCH_ROWS = 64
_BATCH_BYTES = 8 << 20
"""Rows and bytes that are decoded at once. A text that is stored once for many rows can make a
batch larger."""
_MAGIC = b"PAR1"
"""The first bytes of a Parquet file."""
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_OF_AGENTS = ("tools", "agent_name")
_WITHOUT_EFFECT = {"ability", *_MEDIA}
"""Columns that verl does not read either, and columns that are refused unless they are empty."""
_AGAIN = "; fetch or write the file again"

_json = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class Row:
    """A checked prompt from a file."""

    where: str
    """Text that names the row and the file, for use in messages."""
    messages: list[dict[str, Any]]
    text: str
    """The messages as JSON."""
    data_source: str
    ground_truth: str
    extra_info: str | None

    @property
    def characters(self) -> int:
        """The number of characters in the staged columns."""
        return len(self.text) + len(self.ground_truth) + len(self.extra_info or "")


class PromptFile:
    """A file of `data.train_files` or `data.val_files` whose columns have been checked."""

    def __init__(self, key: str, name: str, data: Data) -> None:
        """Open a file.

        Args:
            key: The setting that names the file.
            name: The file's name as given in the settings.
            data: The `data` section of the settings, which names the columns.

        Raises:
            InputError: The file or a column is missing, the file has no rows, or its rows contain
                images, videos or audio.
        """
        self.name = name
        self.path = local_file(key, name)
        self._at = f"{key}: {name}"
        self._data = data
        _check_kind(key, name, self.path, data)
        try:
            self._file = pq.ParquetFile(self.path, pre_buffer=False, buffer_size=1 << 20)
            self._check_columns(key)
            if not self._file.metadata.num_rows:
                raise InputError([f"{self._at} has no rows; write at least one prompt into it"])
            if media := [name for name in _MEDIA if self._has_content(name)]:
                raise InputError(
                    [
                        f"{self._at} has {', '.join(media)} in column {name!r}, but only text is "
                        "supported; remove the column and the prompts that refer to it"
                        for name in media
                    ]
                )
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def notes(self) -> Iterator[str]:
        """Yield a note on the columns that are not read."""
        read = {*self._columns(), *_WITHOUT_EFFECT}
        names = [name for name in self._file.schema_arrow.names if name not in read]
        if not names:
            return
        note = f"{self._at}: not read: column{'s' * (len(names) > 1)} {', '.join(names)}"
        if of_agents := [name for name in _OF_AGENTS if self._has_content(name)]:
            note += (
                f"; verl may use {' and '.join(of_agents)} to give the model tools or to choose an "
                "agent loop, but here each response is one answer to the prompt, without tools"
            )
        yield note

    def chunks(self) -> Iterator[list[Row]]:
        """Yield the rows of the file in order, until the first invalid row.

        The limits of a chunk are CHUNK_ROWS and CHUNK_CHARACTERS.

        Raises:
            InputError: A row does not have verl's layout, or the file is damaged.
        """
        chunk: list[Row] = []
        characters, problem, wrong = 0, "", 0
        for number, record in enumerate(self._records()):
            try:
                row = _row(f"row {number} of {self.name}", record, self._data)
            except ValueError as error:
                problem = problem or f"{self._at}, row {number}: {error}"
                wrong += 1
            if wrong:
                continue
            chunk.append(row)
            characters += row.characters
            if len(chunk) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        if wrong:
            total = self._file.metadata.num_rows
            more = f" ({wrong} of {total} rows are invalid)" if wrong > 1 else ""
            raise InputError([f"{problem}{more}"])
        if chunk:
            yield chunk

    def _columns(self) -> list[str]:
        names = [self._data.prompt_key, self._data.reward_fn_key, "reward_model"]
        there = "extra_info" in self._file.schema_arrow.names
        return [*names, "extra_info"] if there else names

    def _check_columns(self, key: str) -> None:
        found = self._file.schema_arrow.names
        there = f"(found {', '.join(found)})"
        named = {
            "data.prompt_key": self._data.prompt_key,
            "data.reward_fn_key": self._data.reward_fn_key,
        }
        missing = [
            f"{self._at} has no column {column!r} {there}; add it, or set {setting} to the name of "
            "the right column"
            for setting, column in named.items()
            if column not in found
        ]
        if "reward_model" not in found:
            missing.append(
                f"{self._at} has no column 'reward_model' {there}; add it as "
                '{"style": "rule", "ground_truth": ...}, as in verl'
            )
        if missing:
            raise InputError(missing)

    def _records(self) -> Iterator[dict[str, Any]]:
        try:
            for batch in self._batches(self._columns()):
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def _batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield batches of rows, which are short if rows are large."""
        most = 1
        for group in map(self._file.metadata.row_group, range(self._file.num_row_groups)):
            sizes = [
                chunk.total_uncompressed_size
                for chunk in map(group.column, range(group.num_columns))
                if chunk.path_in_schema.split(".")[0] in columns
            ]
            most = max(most, sum(sizes) // max(1, group.num_rows))
        rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // most))
        yield from self._file.iter_batches(rows, columns=list(columns), use_threads=False)

    def _has_content(self, column: str) -> bool:
        """Return whether a column exists and has a value that is neither null nor empty."""
        if column not in self._file.schema_arrow.names:
            return False
        return any(any(batch.column(0).to_pylist()) for batch in self._batches([column]))

    def _unreadable(self, error: Exception) -> InputError:
        """Return the error for a file that cannot be read, with the fix if it is known."""
        fix = _AGAIN
        if isinstance(error, MemoryError):
            fix = "; its rows or pages are too large for this machine's memory"
        elif isinstance(error, pa.ArrowNotImplementedError):
            fix = "; write it with types and a compression that pyarrow reads"
        elif isinstance(error, OSError) and error.errno is not None:
            fix = ""  # an error of the system, such as a missing permission
        return InputError([f"{self._at} cannot be read as Parquet: {error}{fix}"])


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


def _row(where: str, record: dict[str, Any], data: Data) -> Row:
    """Check a row and return it. Raises a ValueError that describes the problem."""
    source = record[data.reward_fn_key]
    if not isinstance(source, str):
        raise ValueError(f"column {data.reward_fn_key!r} has {_short(source)}, expected text")
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
    messages = _messages(data.prompt_key, record[data.prompt_key])
    return Row(
        where,
        messages,
        _as_json(data.prompt_key, messages),
        source,
        _as_json("reward_model.ground_truth", reward_model["ground_truth"]),
        None if extra_info is None else _as_json("extra_info", extra_info),
    )


def _messages(column: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise ValueError(_expected_messages(column, value))
    # In Parquet, every message has the keys of all messages; an absent value is null.
    messages = [{name: part for name, part in one.items() if part is not None} for one in value]
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            raise ValueError(_parts_problem(column, content))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(_expected_messages(column, value))
    return messages


def _expected_messages(column: str, value: Any) -> str:
    return (
        f"column {column!r} has {_short(value)}, expected a list of messages with the "
        'texts role and content; write [{"role": "user", "content": "1+1="}]'
    )


def _parts_problem(column: str, parts: list[Any]) -> str:
    kinds = {str(part.get("type")) for part in parts if isinstance(part, dict)}
    if others := sorted(kinds - {"text"}):
        return (
            f"column {column!r} has message content with a part of type {', '.join(others)}, but "
            "only text is supported; remove the row"
        )
    return (
        f"column {column!r} has message content as a list of {len(parts)} parts, expected one "
        "text; join the texts of the parts"
    )


def _as_json(column: str, value: Any) -> str:
    try:
        return _json(value)
    except TypeError as error:
        raise ValueError(f"column {column!r} has {_short(value)}, not JSON: {error}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
