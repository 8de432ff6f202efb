"""All settings as a flat mapping from dotted key to setting, for messages and documentation."""

import copy
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config.section import PLACE, NamedFunction
from pipeline.config.tree import RunConfig

_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
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
        """Whether the setting is the path of an input, whose content is part of the identity."""
        return _marked(self.field, "input")

    @property
    def default(self) -> Any:
        """The setting's default; PydanticUndefined for a required setting."""
        return self.field.get_default(call_default_factory=True, validated_data={})

    @property
    def expected_item(self) -> str:
        """The allowed values of each item of a list, in words."""
        lists = (one for one in _options(self.field.annotation) if typing.get_origin(one) is list)
        item, bounds = _item(next(lists))
        return _describe(item, bounds)

    @property
    def names_place(self) -> bool:
        """Whether the setting is a path or URI, or a list of them."""
        return PLACE in self.field.metadata

    @property
    def is_text(self) -> bool:
        """Whether the setting is a text or a list of texts, and never a number or a switch."""
        return _texts(self.field.annotation)

    @property
    def nullable(self) -> bool:
        """Whether the setting may be null."""
        return type(None) in _options(self.field.annotation)


@cache
def all_keys() -> dict[str, Key]:
    """Return all groups and settings by dotted key, in the order of the tree."""
    return {key.name: key for key in _walk(RunConfig, "")}


def setting_keys() -> list[Key]:
    """Return the settings without their groups."""
    return [key for key in all_keys().values() if key.section is None]


def value_at(config: BaseModel, key: str) -> Any:
    """Return the value of a dotted key, or None if an optional group above it is absent."""
    value: Any = config
    for part in key.split("."):
        if value is None:
            return None
        value = getattr(value, part)
    return value


def is_set(config: BaseModel, key: str) -> bool:
    """Return whether the user set the setting, instead of leaving it at its default."""
    first, _, rest = key.partition(".")
    if first not in config.model_fields_set:
        return False
    below = getattr(config, first)
    return not rest or (isinstance(below, BaseModel) and is_set(below, rest))


def with_value(section: _Section, key: str, value: Any) -> _Section:
    """Return a copy of a group of settings with a new value for one key, which counts as set.

    Args:
        section: The group of settings; it is not changed.
        key: The dotted key, relative to the group.
        value: The new value.
    """
    first, _, rest = key.partition(".")
    below = copy.deepcopy(value) if not rest else with_value(getattr(section, first), rest, value)
    return section.model_copy(update={first: below})


def _walk(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        below = _section_of(field.annotation)
        yield Key(prefix + name, _expected(field), field, below)
        if below is not None:
            yield from _walk(below, f"{prefix}{name}.")


def _texts(annotation: Any) -> bool:
    """Return whether all values of a type are texts, lists of texts or null."""
    kinds = {
        type(value) if origin is Literal else origin or option
        for option in _options(annotation)
        for origin in [typing.get_origin(option)]
        for value in (typing.get_args(option) if origin is Literal else [None])
    } - {type(None)}
    lists = [one for one in _options(annotation) if typing.get_origin(one) is list]
    return bool(kinds) and kinds <= {str, list} and all(_texts(_item(one)[0]) for one in lists)


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
    """Return the table whose names the setting accepts, or None for any other setting."""
    return next((rule for rule in field.metadata if isinstance(rule, NamedFunction)), None)


def _expected(field: FieldInfo) -> str:
    if (rule := named_in(field)) is not None:
        return rule.expected
    bounds = _bounds(field.metadata)
    parts = [
        _describe(option, bounds + _lengths(field.metadata, _COUNTED.get(option, "items")))
        for option in _options(field.annotation)
    ]
    words = " or ".join(parts)
    return re.sub(r"\btext(s?)\b", _as_path, words) if PLACE in field.metadata else words


def _as_path(found: re.Match[str]) -> str:
    return "paths" if found[1] else "a path"


def describe(annotation: Any) -> str:
    """Return the values that a type allows, in words, such as `an integer or null`."""
    return " or ".join(_describe(option, "") for option in _options(annotation))


def literals(annotation: Any) -> list[str]:
    """Return the texts that a type with a fixed choice allows; none for other types."""
    if typing.get_origin(annotation) is Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [text for part in typing.get_args(annotation) for text in literals(part)]


def _describe(annotation: Any, bounds: str) -> str:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        values = [str(value) for value in typing.get_args(annotation)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if origin is list:
        item, each = _item(annotation)
        kind = _PLURALS.get(item, f"items, each {_describe(item, '')}")
        return f"a list of {kind}{each}{bounds}"
    if origin is dict or _section_of(annotation) is not None:
        return "a group of settings"
    return _NAMES[annotation] + ("" if annotation is type(None) else bounds)


def _item(annotation: Any) -> tuple[Any, str]:
    """Return the type of a list's items and the description of their bounds."""
    (item,) = typing.get_args(annotation)
    if typing.get_origin(item) is not Annotated:
        return item, ""
    item, *rules = typing.get_args(item)
    return item, _bounds(rules)


def _lengths(metadata: list[Any], what: str) -> str:
    """Describe the allowed number of characters or items, for example `of 1 to 200 characters`."""
    least = next((rule.min_length for rule in metadata if isinstance(rule, MinLen)), None)
    most = next((rule.max_length for rule in metadata if isinstance(rule, MaxLen)), None)
    if least is None or most is None:
        return ""
    count = str(least) if least == most else f"{least} to {most}"
    return f", with {count} items" if what == "items" else f" of {count} {what}"


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
            case _ if rule is PLACE:
                continue
            case _:
                text += f" matching {rule.pattern}"
    return text


def _marked(field: FieldInfo, marker: str) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and extra.get(marker) is True
