"""The model's tokenizer and chat template, without a deep-learning library."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from pipeline.errors import InputError
from pipeline.model.tokenizer import read_tokenizer

_KEY = "actor_rollout_ref.model.path"
_OURS = {
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "return_tensors",
    "return_dict",
}
"""Arguments of transformers' apply_chat_template that determine the form of its result."""
_CHANGING = {"the clock (strftime_now)": r"\bstrftime_now\b", "chance (random)": r"\|\s*random\b"}
"""What makes a chat template render a prompt differently each time, with a pattern to find it."""


class ChatTokenizer:
    """The tokenizer.json and chat template of a model's folder."""

    def __init__(self, folder: Path, variables: Mapping[str, Any] | None = None) -> None:
        """Read the tokenizer of a model's folder.

        Args:
            folder: The model's folder.
            variables: Further variables for the chat template (data.apply_chat_template_kwargs).

        Raises:
            InputError: The tokenizer or its template is missing or cannot be read, or Retrace sets
                one of the variables itself.
        """
        self._variables = dict(variables or {})
        if wrong := sorted(_OURS & self._variables.keys()):
            raise InputError(
                [
                    f"data.apply_chat_template_kwargs: found {', '.join(wrong)}, which Retrace "
                    "sets itself; expected variables of the model's chat template; remove it"
                ]
            )
        if not (folder / "tokenizer.json").is_file():
            raise InputError(
                [
                    f"{_KEY}: {folder} has no tokenizer.json; create one with transformers: "
                    "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
                ]
            )
        try:
            self._tokenizer = read_tokenizer(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                [f"{_KEY}: the tokenizer in {folder} cannot be used: {error}"]
            ) from error
        # A tokenizer.json may contain limits of another use, which would cut or pad prompts.
        self._tokenizer.backend_tokenizer.no_truncation()
        self._tokenizer.backend_tokenizer.no_padding()
        if self._tokenizer.chat_template is None:
            raise InputError(
                [
                    f"{_KEY}: the tokenizer in {folder} has no chat template; add "
                    "chat_template.jinja (an instruction-tuned model of the family has one)"
                ]
            )

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return messages as one text, which ends where the answer begins. Raises ValueError."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._variables
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the model's chat template refuses the prompt: {error}") from error
        return text

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts to which the template has already added special tokens."""
        found = self._tokenizer.backend_tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return [encoding.ids for encoding in found]

    def notes(self) -> Iterator[str]:
        """Yield a note if the chat template may render a prompt differently each time."""
        template = str(self._tokenizer.chat_template)
        for name, pattern in _CHANGING.items():
            if re.search(pattern, template):
                yield (
                    f"{_KEY}: the chat template depends on {name}; the run keeps the prompts as "
                    "they were rendered when they were staged"
                )


def template_notes(folder: Path, variables: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note if the text of a model's chat template does not contain a variable's name.

    Args:
        folder: The model's folder.
        variables: The setting data.apply_chat_template_kwargs.
    """
    files = [folder / "tokenizer_config.json", *folder.rglob("*.jinja")]
    words = {word for file in files if file.is_file() for word in _words(file)}
    unread = sorted(variables.keys() - words - {"chat_template"})
    if unread:
        yield (
            f"data.apply_chat_template_kwargs: the chat template in {folder} does not read "
            f"{', '.join(unread)}, so the setting has no effect; correct the name, or remove it"
        )


def _words(file: Path) -> list[str]:
    return re.findall(r"\w+", file.read_text(errors="replace"))
