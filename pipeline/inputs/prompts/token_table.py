"""The table of prompts of a run: tokenised from prompt files, or staged by an earlier start.

A start uses the tokens that are already staged if the files and everything that determines the
tokens are unchanged. So neither a new release of the tokenizer's library nor a chat template that
reads the clock prevents a run from continuing, and prompts are tokenised only once.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pipeline.config.keys import value_at
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.inputs.custom_files import unscored_problems
from pipeline.inputs.fetch import local_file, remote_stamp
from pipeline.inputs.prompts.prompt_file import PromptFile, Row
from pipeline.inputs.prompts.token_writer import TokenWriter
from pipeline.inputs.tokenizer import ChatTokenizer
from pipeline.inputs.weight_files import digest_of
from pipeline.rl.data_sources import find_scorer
from pipeline.run import keys
from pipeline.run.commit import DataFile, sha256_of_file
from pipeline.run.prompt_table import Origin, StoredPrompts
from pipeline.store import Store, StoreError

_RECIPE = (
    "data.prompt_key",
    "data.reward_fn_key",
    "data.max_prompt_length",
    "data.filter_overlong_prompts",
    "data.truncation",
    "data.apply_chat_template_kwargs",
)
"""The settings that determine the rows and tokens of the table."""
_TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
"""The files in the model's folder that determine the tokens."""
_MOST_SOURCES = 1_000
"""Number of data sources without a scorer that are counted."""


@dataclass(frozen=True)
class PromptTable:
    """A table of prompts, ready to be staged or already staged."""

    origin: Origin
    file: DataFile
    """The staged file, or the file to stage."""
    prompts: StoredPrompts
    """Reads the rows of the table."""
    local: TokenWriter | None = None
    """Has the temporary file with the content to stage; None if it is staged already."""
    notes: tuple[str, ...] = ()
    """Notes for the user on the files and the chat template, given when they are tokenised."""

    @property
    def rows(self) -> int:
        """The number of prompts."""
        return self.origin.rows


@dataclass(frozen=True)
class Tokenising:
    """What a prompt file's rows are tokenised with."""

    tokenizer: ChatTokenizer
    recipe: Mapping[str, Any]
    """The settings and digests of files that determine the tokens."""
    positions: int | None
    """The maximum length of the model's samples, in tokens; None if unknown."""

    @classmethod
    def of(cls, config: RunConfig, folder: Path, positions: int | None) -> Self:
        """Return the tokenizer in the model's folder.

        Args:
            config: Settings of the run.
            folder: The model's folder.
            positions: The maximum length of the model's samples, in tokens; None if unknown.

        Raises:
            InputError: The tokenizer cannot be used.
        """
        files = sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)})
        recipe = {key: value_at(config, key) for key in _RECIPE}
        recipe |= {file.name: digest_of(file) for file in files if file.is_file()}
        return cls(ChatTokenizer(folder, config.data.apply_chat_template_kwargs), recipe, positions)


def prompt_table(
    key: str,
    files: Sequence[str],
    config: RunConfig,
    tokenising: Tokenising | None,
    staged: PromptTable | None,
) -> PromptTable | None:
    """Return the staged table if it is still valid, or make the table from its files.

    Args:
        key: The setting that names the files.
        files: The files.
        config: Settings of the run.
        tokenising: The tokenizer and everything that determines the tokens; None if the model has
            problems. The files are checked nevertheless.
        staged: The table that the run uses; None if the run is new.

    Returns:
        The table; None if `tokenising` is None.

    Raises:
        InputError: The files or their rows have problems, the chat template refuses a prompt,
            prompts are longer than `data.max_prompt_length` and neither filtered nor cut, or
            they have no scorer. The error lists the problems with all files.
    """
    if staged is not None and tokenising is not None:
        was = staged.origin
        if was.recipe == tokenising.recipe and _unchanged(key, files, was):
            if problems := unscored_problems(config, key, was.unscored):
                raise InputError(problems)
            return staged
    table = _made(key, files, config, tokenising)
    if staged is not None and table is not None and staged.origin.same_prompts(table.origin):
        return staged
    return table


def staged_table(store: Store, file: DataFile | None) -> PromptTable | None:
    """Return a table that an earlier start has staged; None if it cannot be used again."""
    if file is None:
        return None
    try:
        prompts = StoredPrompts.of(store, file)
    except StoreError:
        return None
    return None if prompts.origin is None else PromptTable(prompts.origin, file, prompts)


def vocabulary_problems(key: str, table: PromptTable, hf_config: Mapping[str, Any]) -> list[str]:
    """Return a problem if prompts contain tokens that the model's vocabulary lacks.

    Args:
        key: The setting that names the prompt files.
        table: The tokenised prompts.
        hf_config: The model's config.json.
    """
    size, largest = hf_config.get("vocab_size"), table.origin.largest_token
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
        if table is not None and table.origin.dropped:
            yield (
                f"{key}: dropped {table.origin.dropped} prompts longer than "
                f"data.max_prompt_length; {table.rows} are left (data.filter_overlong_prompts=True)"
            )
        if table is not None and table.origin.cut:
            yield (
                f"{key}: cut {table.origin.cut} prompts to data.max_prompt_length, at the "
                f"{truncation} (data.truncation)"
            )


def _unchanged(key: str, files: Sequence[str], origin: Origin) -> bool:
    """Return whether files have the content from which a table was made. Paths may differ.

    A file in a remote store is not fetched if its place, size and time are unchanged.
    """
    if len(files) != len(origin.files):
        return False
    for name, digest, stamp in zip(files, origin.files, origin.stamps, strict=True):
        if stamp is None or remote_stamp(key, name) != stamp:
            path = local_file(key, name)
            if not path.is_file() or digest_of(path) != digest:
                return False
    return True


def _made(
    key: str, files: Sequence[str], config: RunConfig, tokenising: Tokenising | None
) -> PromptTable | None:
    """Read files, and tokenise their rows if there is a tokenizer. Raises InputError."""
    problems: list[str] = []
    notes: list[str] = []
    read: list[tuple[str, str | None]] = []
    unscored: Counter[tuple[str, str]] = Counter()
    writer = None if tokenising is None else TokenWriter(key, config.data, tokenising.tokenizer)
    for name in files:
        try:
            stamp = remote_stamp(key, name)
            file = PromptFile(key, name, config.data)
            notes += file.notes()
            for rows in file.chunks():
                _count_unscored(unscored, name, rows)
                if writer is not None and not problems:
                    writer.add(rows)
            read.append((digest_of(file.path), stamp))
        except InputError as error:
            problems += error.problems
    sources = [(*source, count) for source, count in unscored.items()]
    problems += unscored_problems(config, key, sources)
    if writer is not None and tokenising is not None and not problems:
        problem = writer.length_problem(tokenising.positions)
        problems += [] if problem is None else [problem]
    if problems:
        raise InputError(problems)
    if writer is None or tokenising is None:
        return None
    origin = writer.finish(read, tokenising.recipe, sources)
    digest, size = sha256_of_file(writer.path), writer.path.stat().st_size
    staged = DataFile(keys.input_file(digest, "prompts.parquet"), size, digest)
    prompts = StoredPrompts(staged.key, size, writer.ranges)
    return PromptTable(origin, staged, prompts, writer, (*notes, *tokenising.tokenizer.notes()))


def _count_unscored(counts: Counter[tuple[str, str]], file: str, rows: Sequence[Row]) -> None:
    """Count the rows whose data source has no built-in scorer, up to a number of sources."""
    for source, count in Counter(row.data_source for row in rows).items():
        known = (file, source) in counts or len(counts) < _MOST_SOURCES
        if known and find_scorer(source) is None:
            counts[file, source] += count
