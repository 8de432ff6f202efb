"""Typed values of JSON objects. msgspec's errors name the place inside the object: `$.files[2]`."""

from typing import Annotated, Any, TypeVar

import msgspec

_T = TypeVar("_T")

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A number of things, such as bytes, or a number that counts from 0."""
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
"""A SHA-256 digest in hexadecimal digits."""


def convert(value: Any, type_: type[_T]) -> _T:
    """Return a JSON value as a dataclass or any other type that msgspec knows.

    Raises ValueError, which names the place of a missing or wrong value.
    """
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def typed(body: Any, name: str, type_: Any) -> Any:
    """Return a field of a JSON object.

    Args:
        body: The object.
        name: The field.
        type_: A type that msgspec knows.

    Raises:
        ValueError: The field is missing or wrong.
    """
    if not isinstance(body, dict):
        raise ValueError(f"found a {type(body).__name__}, expected an object")
    if name not in body:
        raise ValueError(f"the field {name!r} is missing")
    try:
        return convert(body[name], type_)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
