"""Decoding of token ids into text, with the tokenizer that was staged for a run."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.extras import need
from pipeline.run.commit import DataFile, read_data
from pipeline.run.description import find_description
from pipeline.store import Store, StoreError
from pipeline.traces import TraceError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = Sequence[int] | npt.NDArray[np.integer]


class StagedTokenizer:
    """The tokenizer of a run, fetched from the store on first use."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def there(self) -> bool:
        """Whether the store contains the run's tokenizer. A recorded set does not contain one."""
        return self._file is not None

    def text(self, tokens: Tokens) -> str:
        """Decode tokens into text; special tokens are kept.

        Raises TraceError if no tokenizer is stored. Raises ObjectMissingError, CorruptObjectError
        or StoreError if the tokenizer cannot be read.
        """
        ids = np.asarray(tokens, np.int64).tolist()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    @cached_property
    def _file(self) -> DataFile | None:
        run = find_description(self._store)
        return None if run is None else run.inputs.model.get("tokenizer.json")

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        # Imported here because callers that read only arrays do not need the package.
        need("", "the text of tokens")
        from tokenizers import Tokenizer

        if self._file is None:
            raise TraceError(
                f"{self._store.uri}: no tokenizer is stored there, so tokens cannot be decoded; "
                "open the run that generated the samples to get their text"
            )
        try:
            return Tokenizer.from_buffer(read_data(self._store, self._file))
        except ValueError as error:
            raise StoreError(
                f"{self._file.key} in {self._store.uri}: not a tokenizer: {error}"
            ) from error
