"""Writes the table of tokenised prompts to a temporary file, a chunk at a time."""

import hashlib
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.tree import Data
from pipeline.errors import InputError
from pipeline.inputs.prompts.prompt_file import Row
from pipeline.inputs.tokenizer import ChatTokenizer
from pipeline.run.prompt_table import SCHEMA, Origin, row_bytes

_KNOWN_CHARACTERS = 16 << 20
"""The tokens of prompts are kept for prompts with the same messages, up to this many characters."""

Tokens = npt.NDArray[np.uint32]


@dataclass
class _Lengths:
    """The lengths of the prompts in the files, in tokens."""

    rows: int = 0
    overlong: int = 0
    shortest: int = 0
    longest: int = 0
    longest_row: str = ""


class TokenWriter:
    """Tokenises prompts, and writes each chunk of them as a row group of the table."""

    def __init__(self, key: str, data: Data, tokenizer: ChatTokenizer) -> None:
        """Create the temporary file, which the system removes with this object.

        Args:
            key: The setting that names the files, for messages.
            data: The `data` section of the settings, which limits the lengths of prompts.
            tokenizer: The model's tokenizer.
        """
        self._key = key
        self._data = data
        self._tokenizer = tokenizer
        self._known: dict[str, Tokens] = {}
        self._known_characters = 0
        self._lengths = _Lengths()
        self._rows = self._tokens = self._largest = self._cut = 0
        self._rows_sha256, self._tokens_sha256 = hashlib.sha256(), hashlib.sha256()
        with ExitStack() as opened:
            self._file = opened.enter_context(tempfile.TemporaryFile())
            self._writer = opened.enter_context(
                pq.ParquetWriter(
                    self._file,
                    SCHEMA,
                    compression="zstd",
                    write_statistics=False,
                    write_page_checksum=True,
                )
            )
            weakref.finalize(self, opened.pop_all().close)

    @property
    def path(self) -> Path:
        """The path of the temporary file, which has no name, while this object exists."""
        return Path(f"/proc/self/fd/{self._file.fileno()}")

    def ranges(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each (offset, length) of the file."""
        return [os.pread(self._file.fileno(), length, offset) for offset, length in wanted]

    def add(self, rows: Sequence[Row]) -> None:
        """Tokenise some rows and write those that are kept.

        Raises:
            InputError: The chat template refuses a prompt, or returns an empty text, or the
                temporary file cannot be written.
        """
        most = self._data.max_prompt_length
        kept: list[tuple[Row, Tokens]] = []
        for row, ids in zip(rows, self._tokenise(rows), strict=True):
            self._rows_sha256.update(
                row_bytes(row.text, row.data_source, row.ground_truth, row.extra_info)
            )
            self._measure(row, len(ids))
            if len(ids) <= most or not self._data.filter_overlong_prompts:
                kept.append((row, self._shortened(ids)))
        if kept:
            self._write([row for row, _ in kept], [ids for _, ids in kept])

    def _measure(self, row: Row, length: int) -> None:
        found = self._lengths
        found.shortest = min(found.shortest, length) if found.rows else length
        found.rows += 1
        found.overlong += length > self._data.max_prompt_length
        if length > found.longest:
            found.longest, found.longest_row = length, row.where

    def finish(
        self,
        files: Sequence[tuple[str, str | None]],
        recipe: Mapping[str, Any],
        unscored: Sequence[tuple[str, str, int]],
    ) -> Origin:
        """Complete the file, and return the table's origin.

        Args:
            files: For each prompt file, its SHA-256 and, if it is remote, its stamp.
            recipe: The settings and digests that determine the tokens.
            unscored: File, data source and number of the prompts without a built-in scorer.

        Raises:
            InputError: The temporary file cannot be written.
        """
        found = self._lengths
        origin = Origin(
            files=[digest for digest, _ in files],
            stamps=[stamp for _, stamp in files],
            recipe=recipe,
            rows_sha256=self._rows_sha256.hexdigest(),
            tokens_sha256=self._tokens_sha256.hexdigest(),
            rows=self._rows,
            dropped=found.rows - self._rows,
            cut=self._cut,
            tokens=self._tokens,
            largest_token=self._largest,
            unscored=list(unscored),
        )
        try:
            self._writer.add_key_value_metadata(origin.metadata())
            self._writer.close()
            self._file.flush()
        except OSError as error:
            raise self._unwritten(error) from error
        return origin

    def length_problem(self, positions: int | None) -> str | None:
        """Return the problem with prompts that are too long; None if there is none.

        Args:
            positions: The maximum length of the model's samples, in tokens; None if unknown.
        """
        found, data = self._lengths, self._data
        if found.overlong and not data.filter_overlong_prompts and data.truncation == "error":
            fix = f"set it to {found.longest}, "
            if positions is not None and found.longest + data.max_response_length > positions:
                fix = (
                    f"with data.max_response_length={data.max_response_length} the model's "
                    f"{positions} positions are too few for a prompt of this length: shorten the "
                    "prompts, "
                )
            return (
                f"data.max_prompt_length: {found.overlong} of {found.rows} prompts of {self._key} "
                f"have more than {data.max_prompt_length} tokens; the longest, "
                f"{found.longest_row}, has {found.longest}; {fix}drop them with "
                "data.filter_overlong_prompts=True, or cut them with data.truncation=left"
            )
        if not self._rows:
            return (
                f"{self._key}: all {found.rows} prompts have more than data.max_prompt_length="
                f"{data.max_prompt_length} tokens and were dropped; set it to {found.shortest} or "
                "more"
            )
        return None

    def _tokenise(self, rows: Sequence[Row]) -> list[Tokens]:
        """Return the tokens of each row, tokenising only messages whose tokens are not kept."""
        new = {row.text: row for row in rows if row.text not in self._known}
        texts = []
        for row in new.values():
            try:
                texts.append(self._tokenizer.render(row.messages))
            except ValueError as error:
                raise InputError([f"{self._key}: {row.where}: {error}"]) from error
        for row, ids in zip(new.values(), self._tokenizer.encode(texts), strict=True):
            if not ids:
                raise InputError(
                    [f"{self._key}: {row.where}: the prompt has no tokens; write text into it"]
                )
            self._known[row.text] = np.array(ids, np.uint32)
        tokens = [self._known[row.text] for row in rows]
        self._known_characters += sum(map(len, new))
        if self._known_characters > _KNOWN_CHARACTERS:
            self._known.clear()
            self._known_characters = 0
        return tokens

    def _shortened(self, ids: Tokens) -> Tokens:
        """Cut a prompt to max_prompt_length tokens.

        With truncation `middle` and an odd limit, one more token is kept from the end than from the
        beginning.
        """
        most = self._data.max_prompt_length
        if len(ids) <= most:
            return ids
        self._cut += 1
        if self._data.truncation == "left":
            return ids[-most:]
        if self._data.truncation == "right":
            return ids[:most]
        begin = most // 2
        return np.concatenate([ids[:begin], ids[begin - most :]])

    def _write(self, rows: Sequence[Row], tokens: Sequence[Tokens]) -> None:
        """Write a row group."""
        values = np.concatenate(tokens)
        ends = np.cumsum([0, *map(len, tokens)], dtype=np.int32)
        self._tokens_sha256.update(np.diff(ends).tobytes() + values.tobytes())
        first, self._rows = self._rows, self._rows + len(rows)
        self._tokens += len(values)
        self._largest = max(self._largest, int(values.max()))
        columns = {
            "prompt_id": range(first, self._rows),
            "messages": [row.text for row in rows],
            "token_ids": pa.ListArray.from_arrays(ends, values),
            "data_source": [row.data_source for row in rows],
            "ground_truth": [row.ground_truth for row in rows],
            "extra_info": [row.extra_info for row in rows],
        }
        try:
            self._writer.write_table(pa.table(columns, schema=SCHEMA), row_group_size=len(rows))
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> InputError:
        return InputError(
            [
                f"{self._key}: the tokenised prompts cannot be written to {tempfile.gettempdir()}: "
                f"{error}; free some space, or set TMPDIR to a larger disk"
            ]
        )
