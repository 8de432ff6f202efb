"""Strict JSON for stored objects: RFC 8259 in UTF-8.

Input that two readers might interpret differently is refused. docs/trace-format.md lists the rules.
Each function raises ValueError for input that breaks a rule.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

MOST_DEPTH = 64
"""Maximum nesting depth of objects and lists."""
MOST_DIGITS = 100
"""Maximum number of characters in a number."""


@dataclass(frozen=True)
class Number:
    """A number as it is spelled in the text. Example: Number('1e5')."""

    text: str


def parse_json(text: bytes | str) -> Any:
    """Parse a text. Raises ValueError."""
    return _Parser().parse(_decoded(text))


def parse_numbers(text: bytes | str) -> tuple[Any, Any]:
    """Parse a text; return its value twice, the second time with each number as a `Number`.

    The second value is for `canonical`. If Python would write every number exactly as it is spelled
    in the text, no `Number` is needed, and both values are the same object. Raises ValueError.
    """
    plain, decoded = _Parser(), _decoded(text)
    value = plain.parse(decoded)
    return value, value if plain.exact else json.loads(
        decoded, parse_float=Number, parse_int=Number
    )


def canonical(value: Any) -> str:
    """Return the canonical form of a value, from which digests are computed.

    Floats are written as Python writes them, and each `Number` as spelled. Raises ValueError for
    NaN, infinity and lone surrogates.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except TypeError:  # for a Number: the C encoder accepts only floats and integers
        return _written(value)


class _Parser:
    """A parser that records whether Python would write every number as the text spells it."""

    def __init__(self) -> None:
        self.exact = True

    def parse(self, text: str) -> Any:
        try:
            value = json.loads(
                text,
                object_pairs_hook=_object,
                parse_float=self._float,
                parse_int=self._integer,
                parse_constant=_constant,
            )
        except RecursionError as error:
            raise ValueError(f"nested more than {MOST_DEPTH} deep") from error
        _check_depth(value)
        if "\\u" in text:  # only an escape can produce half of a surrogate pair
            _check_surrogates(value)
        return value

    def _float(self, token: str) -> float:
        value = float(token)
        if len(token) > MOST_DIGITS or math.isinf(value):
            raise ValueError(f"{_begin(token)} is too large or too long for a number")
        if float.__repr__(value) != token:
            self.exact = False
        return value

    def _integer(self, token: str) -> int:
        if len(token) > MOST_DIGITS:
            raise ValueError(f"{_begin(token)} is too long for a number")
        if token == "-0":
            self.exact = False
        return int(token)


def _decoded(text: bytes | str) -> str:
    if isinstance(text, str):
        return text
    if text[:3] == b"\xef\xbb\xbf":
        raise ValueError("the text begins with a byte-order mark, expected UTF-8 without one")
    if text[:2] in (b"\xfe\xff", b"\xff\xfe") or text[:2].count(0):
        raise ValueError("the text is UTF-16 or UTF-32, expected UTF-8")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the text is not UTF-8: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        rest = set(found)
        for name, _ in pairs:
            if name not in rest:
                raise ValueError(f"an object contains the key {_begin(name)!r} twice")
            rest.remove(name)
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {MOST_DEPTH} deep")


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a string contains half of a surrogate pair") from error


def _written(value: Any) -> str:
    """Return the text that the C encoder would write, but with Numbers as spelled.

    The caller must have checked the value's depth.
    """
    if isinstance(value, Number):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_written(value[k])}" for k in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value, allow_nan=False)


def _begin(token: str) -> str:
    return token if len(token) <= 40 else f"{token[:40]}..."
