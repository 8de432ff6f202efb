"""Errors of loading a model: which of them a restart would meet again."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError

from pipeline.errors import LastingError

_LASTING = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError),
    *(StrictDataclassError, TypeError, ValueError),
)
"""Errors of code that reads a config or weights which it does not support."""
_OF_SHAPES = re.compile(r"\b(sizes?|shapes?|not implemented|unsupported)\b", re.IGNORECASE)
"""torch raises RuntimeError for tensors that do not fit, but also for lost connections."""
_MAY_PASS = re.compile("free memory", re.IGNORECASE)
"""vLLM raises ValueError if another process still holds the memory of a GPU."""


class LoadError(LastingError):
    """A model cannot be loaded; the cause is the library's error."""


@contextmanager
def lasting_errors(what: str, *own: type[Exception]) -> Iterator[None]:
    """Raise LoadError for errors that would recur after a restart, and leave other errors as is.

    Errors that may pass, for example for lack of memory or a connection, are not changed.

    Args:
        what: The work of the block, for the message. Example: "loading the model into Megatron".
        own: Further types of errors that would recur.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        of_shapes = type(error) is RuntimeError and _OF_SHAPES.search(text)
        if isinstance(error, LastingError) or _MAY_PASS.search(text):
            raise
        if of_shapes or isinstance(error, (*_LASTING, *own)):
            raise LoadError(f"{what} failed: {type(error).__name__}: {text}") from error
        raise
