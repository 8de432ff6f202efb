"""The one tokenizer of a model: for prompts, in the engine and for rewards.

Traces are decoded from the same tokenizer.json (retrace/tokenizer.py).
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer that a folder's tokenizer.json defines.

    Transformers' AutoTokenizer is not used: the class that tokenizer_config.json names may build a
    different tokenizer from the same vocabulary. The generic class keeps tokenizer.json unchanged,
    and reads the chat template and the names of the special tokens from the other files.

    Raises:
        ValueError: The other files define a token differently, or no file names an end token.
        OSError, KeyError, TypeError: A file cannot be read.
    """
    found: Any = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    own = _added(Tokenizer.from_file(str(folder / "tokenizer.json")))
    for id, (text, special) in _added(found.backend_tokenizer).items():
        if own.get(id) != (text, special):
            raise ValueError(
                f"tokenizer_config.json or added_tokens.json has token {id} as {text!r} with "
                f"special={special}, but tokenizer.json has "
                + (
                    "no such added token"
                    if id not in own
                    else "{!r} with special={}".format(*own[id])
                )
                + "; make tokenizer.json agree, for example with transformers: "
                "PreTrainedTokenizerFast.from_pretrained(folder).save_pretrained(folder)"
            )
    if found.eos_token_id is None and not _model_names_end(folder):
        raise ValueError(
            "tokenizer_config.json has no eos_token, and generation_config.json and config.json "
            "have no eos_token_id, so responses would never end; add eos_token"
        )
    return found


def _added(tokenizer: Tokenizer) -> dict[int, tuple[str, bool]]:
    """Return the added tokens by id, each with its text and whether it is special."""
    added = tokenizer.get_added_tokens_decoder()
    return {id: (token.content, token.special) for id, token in added.items()}


def _model_names_end(folder: Path) -> bool:
    """Return whether the file from which vLLM takes end tokens names one."""
    files = (folder / "generation_config.json", folder / "config.json")
    path = next((path for path in files if path.is_file()), None)
    return path is not None and json.loads(path.read_bytes()).get("eos_token_id") is not None
