"""Token ids as text, by the tokenizer that a run has staged."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from pipeline.store import Store, StoreError, keys
from pipeline.store.commit import DataFile, find_commit, read_data


def token_texts(store: Store, tokens: Sequence[int]) -> list[str]:
    """Each token as text, quoted as Python does; '' when the store has no tokenizer.

    A record set has none: it may lie far from the run that wrote it.
    """
    tokenizer = _tokenizer(store)
    if tokenizer is None:
        return ["" for _ in tokens]
    return [repr(tokenizer.decode([token], skip_special_tokens=False)) for token in tokens]


def _tokenizer(store: Store) -> Tokenizer | None:
    run = find_commit(store, keys.run_json())
    file = ((run or {}).get("inputs", {}).get("model") or {}).get("tokenizer.json")
    if file is None:
        return None
    data = read_data(store, DataFile(file["key"], file["size"], file["sha256"]))
    try:
        return Tokenizer.from_buffer(data)
    except ValueError as error:
        raise StoreError(f"{file['key']} in {store.uri}: not a tokenizer: {error}") from error
