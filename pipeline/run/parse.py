"""Checks of values in commit objects, whose writers may be broken or hostile.

Each check returns the value, or raises TypeError or ValueError; its docstring describes a valid
value. The caller adds the object's name to the error.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pipeline.errors import cut
from pipeline.store.base import StoreError, check_key

_T = TypeVar("_T")
_DIGEST = re.compile("[0-9a-f]{64}")


def field(body: Mapping[str, Any], name: str, parse: Callable[[Any], _T]) -> _T:
    """Parse a field of a JSON object.

    Args:
        body: The JSON object.
        name: The field's name.
        parse: Returns the parsed value; raises TypeError or ValueError.

    Raises:
        ValueError: The field is missing or invalid; the message names it.
    """
    if name not in body:
        raise ValueError(f"the field {name!r} is missing")
    try:
        return parse(body[name])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def number(value: Any) -> int:
    """A count, for example of bytes: an integer from 0 to 2^63 - 1."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(f"{cut(value)} is not a count")
    return value


def integer(value: Any) -> int:
    """A signed 64-bit integer."""
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise TypeError(f"{cut(value)} is not a 64-bit integer")
    return value


def real(value: Any) -> float:
    """A finite number."""
    if type(value) is int:
        value = integer(value)
    elif type(value) is not float or not math.isfinite(value):
        raise TypeError(f"{cut(value)} is not a finite number")
    return float(value)


def numbers(value: Any) -> dict[str, float | None]:
    """Finite numbers, keyed by name; None for a number that was not measured."""
    body = mapping(value)
    return {name: None if body[name] is None else field(body, name, real) for name in body}


def digest(value: Any) -> str:
    """A SHA-256 digest, as 64 lower-case hexadecimal digits."""
    if not _DIGEST.fullmatch(text(value)):
        raise ValueError(
            f"{cut(value)} is not a SHA-256 digest of 64 lower-case hexadecimal digits"
        )
    return text(value)


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{cut(value)} is neither true nor false")
    return value


def same(found: Any, expected: Any) -> bool:
    """Return whether two JSON values have the same value and type: 3.0 is not 3, 1 is not true."""
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
        raise TypeError(f"{cut(value)} is not a string")
    return value


def key(value: Any) -> str:
    """The key of an object in the store."""
    try:
        check_key(text(value))
    except StoreError as error:
        raise ValueError(str(error)) from error
    return text(value)


def items(value: Any) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise TypeError(f"{cut(value)} is not a list")
    return value


def listed(parse: Callable[[Any], _T]) -> Callable[[Any], list[_T]]:
    """Return a check of lists: `parse` checks each item, and an error gives the item's index."""

    def parse_list(value: Any) -> list[_T]:
        found: list[_T] = []
        for item in items(value):
            try:
                found.append(parse(item))
            except (TypeError, ValueError) as error:
                raise ValueError(f"item {len(found)}: {error}") from error
        return found

    return parse_list


def mapping(value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise TypeError(f"{cut(value)} is not an object")
    return value
