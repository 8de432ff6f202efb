"""Values of commit objects, which a broken or hostile writer may have made.

Each function returns the value, or raises TypeError or ValueError: the caller knows the object.
"""

from typing import Any

from pipeline.store import StoreError
from pipeline.store.base import check_key


def number(value: Any) -> int:
    """A number of things or bytes."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(f"{value!r} is no number of anything")
    return value


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def key(value: Any) -> str:
    """The key of an object."""
    try:
        check_key(text(value))
    except StoreError as error:
        raise ValueError(str(error)) from error
    return text(value)


def items(value: Any) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value
