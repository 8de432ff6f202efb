"""Changed texts of JSON objects: encodings, duplicate keys, nesting, and invalid JSON.

At L1, the object's own digest and all digests that depend on it are recomputed from the text as
Python's json parses it, because a lax reader would compare these digests.
"""

import json
import re
from collections.abc import Callable, Iterator

from pipeline.run.commit import CONTENT_SHA256
from tests.hostile.case import FREE, HARMLESS, NAMED, Case, Changes, title
from tests.hostile.remake import remade, signed, text
from tests.hostile.worlds import world


def _key_twice(data: bytes, first: bool) -> bytes:
    """Repeat a key of the object with a wrong value, before the right value if `first` is true."""
    body = json.loads(data)
    names = [name for name in ("step", "version", "number", "format", "samples") if name in body]
    name = (names or sorted(body))[0]
    wrong, right = f'"{name}": 77', f'"{name}": {json.dumps(body[name])}'
    rest = {key: value for key, value in body.items() if key not in (name, CONTENT_SHA256)}
    read = {**body, name: body[name] if first else 77}
    pair = f"{wrong}, {right}" if first else f"{right}, {wrong}"
    own = f'"{CONTENT_SHA256}": "{signed(read)[CONTENT_SHA256]}"'
    return f"{{{pair}, {own}, {json.dumps(rest)[1:]}".encode()


def _inner_key_twice(data: bytes) -> bytes:
    body = json.loads(data)
    body["unknown_to_us"] = {"a": 2}
    return text(signed(body)).replace(b'{"a": 2}', b'{"a": 1, "a": 2}')


def _last_key_twice(data: bytes) -> bytes:
    body = {**json.loads(data), **{f"k{number}": number for number in range(300_000)}}
    return text(signed(body)).replace(b'"k299998"', b'"k299999"')


def _number(data: bytes, number: str) -> bytes:
    """Add an unknown field whose value is a number, written as this text."""
    body = json.loads(data)
    body["unknown_to_us"] = 4711
    return text(signed(body)).replace(b"4711", number.encode())


def _deep(data: bytes, depth: int, opened: str, closed: str) -> bytes:
    body = text(json.loads(data)).decode()
    return f'{{"unknown_to_us": {opened * depth}1{closed * depth}, {body[1:]}'.encode()


TEXTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "other layout": (lambda data: json.dumps(json.loads(data)).encode(), HARMLESS),
    "keys in another order": (
        lambda data: json.dumps(dict(reversed(json.loads(data).items()))).encode(),
        HARMLESS,
    ),
    "byte-order mark": (lambda data: b"\xef\xbb\xbf" + data, NAMED),
    "UTF-16": (lambda data: data.decode().encode("utf-16"), NAMED),
    "UTF-16 without mark": (lambda data: data.decode().encode("utf-16-be"), NAMED),
    "UTF-32": (lambda data: data.decode().encode("utf-32-le"), NAMED),
    "not UTF-8": (lambda data: data.replace(b'": ', b'": "\xff", "x": ', 1), NAMED),
    "key twice, the right one last": (lambda data: _key_twice(data, True), NAMED),
    "key twice, the right one first": (lambda data: _key_twice(data, False), NAMED),
    "inner key twice": (_inner_key_twice, NAMED),
    "the last of 300,000 keys twice": (_last_key_twice, NAMED),
    "NaN": (lambda data: _number(data, "NaN"), NAMED),
    "Infinity": (lambda data: _number(data, "-Infinity"), NAMED),
    "1e999": (lambda data: _number(data, "1e999"), NAMED),
    "digits of another script": (lambda data: _number(data, "4٣٤"), NAMED),
    "leading zero": (lambda data: _number(data, "04711"), NAMED),
    "10^5000": (lambda data: _number(data, "1" * 5_000), NAMED),
    "nested lists": (lambda data: _deep(data, 100_000, "[", "]"), NAMED),
    "nested objects": (lambda data: _deep(data, 100_000, '{"a":', "}"), NAMED),
    "nested a little too deep": (lambda data: _deep(data, 990, "[", "]"), NAMED),
    "open lists": (lambda data: b"[" * 100_000, NAMED),
    "trailing object": (lambda data: data + b"{}", NAMED),
    "trailing NUL": (lambda data: data + b"\0", NAMED),
    "a list": (lambda data: b"[" + data + b"]", NAMED),
    "a text": (lambda data: json.dumps(data.decode()).encode(), NAMED),
    "null": (lambda data: b"null", NAMED),
    "empty": (lambda data: b"", NAMED),
    "empty object": (lambda data: b"{}", NAMED),
    "comment": (lambda data: b"/* */" + data, NAMED),
    "single quotes": (lambda data: data.replace(b'"', b"'"), NAMED),
    "trailing comma": (lambda data: re.sub(rb"\}\s*$", b",}", data), NAMED),
    "16 MB of blanks": (lambda data: b" " * (16 << 20) + data, FREE),
}


def cases(name: str) -> Iterator[Case]:
    """Yield each JSON object of a world with each change to its text."""
    for key, data in sorted(world(name).items()):
        if not key.endswith(".json") or CONTENT_SHA256.encode() not in data:
            continue
        for what, (_, expect) in TEXTS.items():
            for level in ("L0",) if expect == HARMLESS else ("L0", "L1"):
                yield Case(
                    f"text/{name}:{title(key)}/{what}/{level}",
                    name,
                    lambda key=key, what=what, level=level: _changed(name, key, what, level),
                    expect,
                )


def _changed(name: str, key: str, what: str, level: str) -> Changes:
    objects = world(name)
    new = TEXTS[what][0](objects[key])
    if level == "L0":
        return {key: new}
    # Update the objects that refer to this object, but keep its new text and the digest in it.
    return {**remade(objects, {key: new}), key: new}
