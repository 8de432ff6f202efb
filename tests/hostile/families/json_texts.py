"""JSON objects as text: other encodings, keys that stand twice, nesting, what is no JSON at all.

At L1 the object's own digest, and all that follow from it, are those of what Python's json makes of
the text, which is what a lax reader would compare.
"""

import json
import re
from collections.abc import Callable, Iterator

from pipeline.run.commit import CONTENT_SHA256
from tests.hostile.case import FREE, HARMLESS, NAMED, Case, Changes, title
from tests.hostile.remake import remade, signed, text
from tests.hostile.worlds import world


def _key_twice(data: bytes, first: bool) -> bytes:
    """A key of the object stands twice, with another value before or after the right one."""
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
    """A number as it should not stand there, in a field that nobody knows."""
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
    "something behind it": (lambda data: data + b"{}", NAMED),
    "a NUL behind it": (lambda data: data + b"\0", NAMED),
    "a list": (lambda data: b"[" + data + b"]", NAMED),
    "a text": (lambda data: json.dumps(data.decode()).encode(), NAMED),
    "null": (lambda data: b"null", NAMED),
    "empty": (lambda data: b"", NAMED),
    "empty object": (lambda data: b"{}", NAMED),
    "comment": (lambda data: b"/* */" + data, NAMED),
    "single quotes": (lambda data: data.replace(b'"', b"'"), NAMED),
    "comma at its end": (lambda data: re.sub(rb"\}\s*$", b",}", data), NAMED),
    "16 MB of blanks": (lambda data: b" " * (16 << 20) + data, FREE),
}


def cases(name: str) -> Iterator[Case]:
    """Of a world: each JSON object in each of these texts."""
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
    # Objects that refer to it follow; it stays as it is, its own digest included.
    return {**remade(objects, {key: new}), key: new}
