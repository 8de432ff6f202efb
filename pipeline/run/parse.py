"""Checks of values in commit objects, which a broken or hostile writer may have made.

Each function returns the value, or raises TypeError or ValueError; the caller names the object.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pipeline.store.base import StoreError, check_key

_T = TypeVar("_T")
_DIGEST = re.compile("[0-9a-f]{64}")


def field(body: Mapping[str, Any], name: str, parse: Callable[[Any], _T]) -> _T:
    """A field of a JSON object. Raises ValueError, naming it, when it is missing or wrong."""
    if name not in body:
        raise ValueError(f"it has no {name!r}")
    try:
        return parse(body[name])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def number(value: Any) -> int:
    """A count, of bytes for example: an integer from 0 to 2^63 - 1."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(f"{value!r} is no number of anything")
    return value


def integer(value: Any) -> int:
    """An integer of 64 bits, which may be negative."""
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise TypeError(f"{value!r} is no whole number of 64 bits")
    return value


def real(value: Any) -> float:
    """A finite number."""
    if type(value) is int:
        value = integer(value)
    elif type(value) is not float or not math.isfinite(value):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def numbers(value: Any) -> dict[str, float | None]:
    """Finite numbers by name; None: not measured."""
    body = mapping(value)
    return {name: None if body[name] is None else field(body, name, real) for name in body}


def digest(value: Any) -> str:
    """A SHA-256 in lower-case hexadecimal digits."""
    if not _DIGEST.fullmatch(text(value)):
        raise ValueError(f"{value!r} is no SHA-256 in 64 lower-case hexadecimal digits")
    return text(value)


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def same(found: Any, expected: Any) -> bool:
    """Whether a parsed JSON value is this one, integers as integers: 3.0 is not 3, nor true 1."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(
            same(value, expected[name]) for name, value in found.items()
        )
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def text(value: Any) -> str:
    """A string."""
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


def mapping(value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return value
