"""A flat list of the settings by dotted key, for messages, docs and the test that freezes them."""

import copy
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config.section import NamedFunction
from pipeline.config.tree import RunConfig

_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
_UNSAID = object()
_Section = TypeVar("_Section", bound=BaseModel)
_COUNTED = {str: "characters"}
_PLURALS = {int: "integers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Key:
    """One setting. Example: Key('trainer.nnodes', 'an integer >= 1', ...)."""

    name: str
    """Dotted key."""
    expected: str
    """The allowed values, in words."""
    field: FieldInfo
    section: type[BaseModel] | None
    """The group of settings under this key; None for a single value."""
    of_group: Any = _UNSAID
    """What the group above it says that older runs had here; _UNSAID: it says nothing."""

    @property
    def operational(self) -> bool:
        """Whether the setting may change when a run is attached again."""
        return _marked(self.field, "operational")

    @property
    def for_workers(self) -> bool:
        """Whether workers read this operational setting."""
        return _marked(self.field, "for_workers")

    @property
    def names_input(self) -> bool:
        """Whether the setting is an input's path: the content is identity, the path is not."""
        return _marked(self.field, "input")

    @property
    def is_new(self) -> bool:
        """Whether runs exist that are older than the setting; `former` is their value."""
        return "formerly" in _marks(self.field) or self.of_group is not _UNSAID

    @property
    def former(self) -> Any:
        """The value of runs older than the setting. Raises KeyError if the setting is not new."""
        marks = _marks(self.field)
        if self.of_group is _UNSAID or "formerly" in marks:
            return marks["formerly"]
        return self.of_group

    @property
    def default(self) -> Any:
        """The value without one in a file; PydanticUndefined: there is none."""
        return self.field.get_default(call_default_factory=True, validated_data={})

    @property
    def nullable(self) -> bool:
        """Whether null is allowed."""
        return type(None) in _options(self.field.annotation)


@cache
def all_keys() -> dict[str, Key]:
    """Groups and settings by dotted key, in the order of the tree."""
    return {key.name: key for key in _walk(RunConfig, "", _UNSAID)}


def setting_keys() -> list[Key]:
    """The settings without their groups."""
    return [key for key in all_keys().values() if key.section is None]


def value_at(config: BaseModel, key: str) -> Any:
    """The value of a dotted key; None where an optional group above it is absent."""
    value: Any = config
    for part in key.split("."):
        if value is None:
            return None
        value = getattr(value, part)
    return value


def is_set(config: BaseModel, key: str) -> bool:
    """Whether the user wrote the setting of a dotted key, and not the tree's defaults."""
    first, _, rest = key.partition(".")
    if first not in config.model_fields_set:
        return False
    below = getattr(config, first)
    return not rest or (isinstance(below, BaseModel) and is_set(below, rest))


def with_value(section: _Section, key: str, value: Any) -> _Section:
    """A group of settings with another value of a dotted key, which counts as written."""
    first, _, rest = key.partition(".")
    below = copy.deepcopy(value) if not rest else with_value(getattr(section, first), rest, value)
    return section.model_copy(update={first: below})


def _walk(section: type[BaseModel], prefix: str, of_group: Any) -> Iterator[Key]:
    """`of_group`: what older runs had of this group, by name; _UNSAID: each setting says it."""
    for name, field in section.model_fields.items():
        below = _section_of(field.annotation)
        former = of_group[name] if isinstance(of_group, Mapping) else _UNSAID
        key = Key(prefix + name, _expected(field), field, below, former)
        yield key
        if below is not None:
            of_below = key.former if key.is_new and isinstance(key.former, Mapping) else _UNSAID
            yield from _walk(below, f"{prefix}{name}.", of_below)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _options(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return typing.get_args(annotation)
    return (annotation,)


def named_in(field: FieldInfo) -> NamedFunction | None:
    """The table whose names a setting may have; None: it names none."""
    return next((rule for rule in field.metadata if isinstance(rule, NamedFunction)), None)


def _expected(field: FieldInfo) -> str:
    if (rule := named_in(field)) is not None:
        return rule.expected
    bounds = _bounds(field.metadata)
    parts = [
        _describe(option, bounds + _lengths(field.metadata, _COUNTED.get(option, "items")))
        for option in _options(field.annotation)
    ]
    return " or ".join(parts)


def _describe(annotation: Any, bounds: str) -> str:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        values = [str(value) for value in typing.get_args(annotation)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if origin is list:
        (item,) = typing.get_args(annotation)
        each = ""
        if typing.get_origin(item) is Annotated:
            item, *rules = typing.get_args(item)
            each = _bounds(rules)
        return f"a list of {_PLURALS.get(item, _describe(item, ''))}{each}{bounds}"
    if origin is dict or _section_of(annotation) is not None:
        return "a group of settings"
    return _NAMES[annotation] + ("" if annotation is type(None) else bounds)


def _lengths(metadata: list[Any], what: str) -> str:
    """How many characters or items there may be: `of 1 to 200 characters`, `, 2 of them`."""
    least = next((rule.min_length for rule in metadata if isinstance(rule, MinLen)), None)
    most = next((rule.max_length for rule in metadata if isinstance(rule, MaxLen)), None)
    if least is None or most is None:
        return ""
    count = str(least) if least == most else f"{least} to {most}"
    return f", {count} of them" if what == "items" else f" of {count} {what}"


def _bounds(metadata: list[Any]) -> str:
    text = ""
    for rule in metadata:
        match rule:
            case Ge(ge=bound):
                text += f" >= {bound}"
            case Gt(gt=bound):
                text += f" > {bound}"
            case Le(le=bound):
                text += f"{' and' if text else ''} <= {bound}"
            case Lt(lt=bound):
                text += f"{' and' if text else ''} < {bound}"
            case MinLen() | MaxLen():
                continue  # `_lengths`
            case _:
                text += f" matching {rule.pattern}"
    return text


def _marked(field: FieldInfo, marker: str) -> bool:
    return _marks(field).get(marker) is True


def _marks(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    return dict(extra) if isinstance(extra, dict) else {}
