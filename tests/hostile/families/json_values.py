"""Every field of every JSON object with different values."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.run import keys
from pipeline.run.commit import CONTENT_SHA256
from tests.hostile.case import FREE, HARMLESS, Case, Changes, title
from tests.hostile.remake import remade, text
from tests.hostile.worlds import NEWER, WITH_TWINS, Objects, twin, world

Path = tuple[str | int, ...]
MISSING = object()

VALUES: dict[str, Callable[[Any], Any]] = {
    "missing": lambda _: MISSING,
    "null": lambda _: None,
    "negative": lambda old: -old if isinstance(old, int) and old else -1,
    "one more": lambda old: old + 1 if isinstance(old, int | float) else MISSING,
    "2^31": lambda _: 1 << 31,
    "2^63": lambda _: 1 << 63,
    "10^400": lambda _: 10**400,
    "half": lambda _: 0.5,
    "true": lambda _: True,
    "text": lambda old: str(old) if isinstance(old, int | float) else "x",
    "empty": lambda old: type(old)() if isinstance(old, str | list | dict) else "",
    "list": lambda old: [old],
    "object": lambda old: {"x": old},
    "control": lambda _: "\x1b[31mred\n",
    "surrogate": lambda _: "\ud800",
    "outside": lambda _: "../../outside",
    "foreign digits": lambda old: _foreign(old),
    "doubled": lambda old: [*old, *old[-1:]] if isinstance(old, list) and old else MISSING,
    "reversed": lambda old: old[::-1] if isinstance(old, list) else MISSING,
    "first removed": lambda old: old[1:] if isinstance(old, list) else MISSING,
}
"""The changes to a value. A change returns MISSING for a value to which it does not apply."""

_OF_NEWER = (
    *("/manifest.json", "/training.json", "/plan.00001.json"),
    *("/rollout/00001.json", "/000-00000-00001.00000005.json"),
)
"""The objects of the worlds in `newer` with fields or roles that no other world has."""
_AT_L0 = ("missing", "one more", "text", "another run's")


def cases(name: str) -> Iterator[Case]:
    """Yield each JSON field of a world with each change, and with values from other objects.

    The other objects belong to the same world or to a twin.
    """
    for key, data in sorted(world(name).items()):
        if not key.endswith(".json") or key.startswith("steps/000001/"):
            continue
        if name == "policies" and not key.startswith(keys.policies()):
            continue  # other worlds have the same run.json
        if name in NEWER and not key.endswith(_OF_NEWER):
            continue  # other worlds have the same fields
        try:
            body = json.loads(data)
        except ValueError:
            continue
        if not isinstance(body, dict) or CONTENT_SHA256 not in body:
            continue
        for path in paths(body):
            where = f"json/{name}:{title(key)}:{'.'.join(map(str, path))}"
            for what in (*VALUES, "another object's", "another run's"):
                for level in ("L0", "L1"):
                    of_digest = path == (CONTENT_SHA256,)
                    # At L0 all changes look the same to a reader: the digest does not match.
                    if of_digest if level == "L1" else not (of_digest or what in _AT_L0):
                        continue
                    yield Case(
                        f"{where}/{what}/{level}",
                        name,
                        lambda key=key, path=path, what=what, level=level: _changed(
                            name, key, path, what, level
                        ),
                    )
        for path in ((), *objects_in(body)):
            where = f"json/{name}:{title(key)}:{'.'.join(map(str, (*path, 'unknown')))}"
            yield Case(
                f"{where}/extra/L1",
                name,
                lambda key=key, path=path: _extra(name, key, path),
                FREE if _is_keyed(path) else HARMLESS,
            )


def _is_keyed(path: Path) -> bool:
    """Return whether the object at a path uses keys as content, so that a new key changes it."""
    return bool({"settings", "extras", "versions", "metrics", "files", "layout", "data"} & {*path})


def paths(value: Any, here: Path = ()) -> Iterator[Path]:
    """Yield the paths of all values; for a list, only those of its first and last elements."""
    if isinstance(value, dict):
        inner: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, list):
        inner = [(i, value[i]) for i in sorted({0, len(value) - 1}) if value]
    else:
        return
    for name, one in inner:
        yield (*here, name)
        yield from paths(one, (*here, name))


def objects_in(body: Any) -> Iterator[Path]:
    """Yield the paths of all JSON objects except the root."""
    for path in paths(body):
        if isinstance(at(body, path), dict):
            yield path


def at(body: Any, path: Path) -> Any:
    """Return the value at a path."""
    for name in path:
        body = body[name]
    return body


def put(body: Any, path: Path, value: Any) -> Any:
    """Return a copy of `body` with a new value at a path; MISSING removes the value."""
    body = copy.deepcopy(body)
    holder = at(body, path[:-1])
    if value is MISSING:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return body


def _changed(name: str, key: str, path: Path, what: str, level: str) -> Changes | None:
    objects = world(name)
    body = json.loads(objects[key])
    old = at(body, path)
    if what == "another object's":
        new = _of_sibling(objects, key, path)
    elif what == "another run's":
        new = _of_twin(name, key, path)
    else:
        new = VALUES[what](old)
        if new is MISSING and what != "missing":
            return None
    if new is not MISSING and type(new) is type(old) and new == old:
        return None
    if new is MISSING and what != "missing":
        return None
    changes = {key: text(put(body, path, new))}
    return changes if level == "L0" else remade(objects, changes)


def _extra(name: str, key: str, path: Path) -> Changes:
    objects = world(name)
    body = put(json.loads(objects[key]), (*path, "unknown_to_us"), {"a": [1, None, "b"]})
    return remade(objects, {key: text(body)})


def _of_sibling(objects: Objects, key: str, path: Path) -> Any:
    """Return the value at this path in another object, if possible one with the same name."""
    for other in sorted(objects, key=lambda other: other.split("/")[-1] != key.split("/")[-1]):
        if other != key and other.endswith(".json"):
            try:
                return at(json.loads(objects[other]), path)
            except (KeyError, IndexError, TypeError, ValueError):
                continue
    return MISSING


def _of_twin(name: str, key: str, path: Path) -> Any:
    if name not in WITH_TWINS:
        return MISSING
    other = twin(name, True)
    try:
        return at(json.loads(other[key]), path)
    except (KeyError, IndexError, TypeError):
        return MISSING


def _foreign(old: Any) -> Any:
    """Return a text with digits from another script, which Python's int() accepts."""
    if not isinstance(old, str) or not any(c.isdigit() for c in old):
        return MISSING
    return "".join(chr(0x660 + int(c)) if c.isdigit() else c for c in old)
