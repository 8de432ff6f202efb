"""All settings as a flat mapping from dotted key to setting, for messages and documentation."""

import copy
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config.section import FOR_WORKERS, INPUT, OPERATIONAL, PLACE, NamedFunction
from pipeline.config.tree import RunConfig

_Section = TypeVar("_Section", bound=BaseModel)
_Schema = Mapping[str, Any]
_NAMES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
}
_PLURALS = {"integer": "integers", "number": "numbers", "string": "texts"}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Key:
    """One setting. Example: Key('trainer.nnodes', ...)."""

    name: str
    """Dotted key."""
    field: FieldInfo
    schema: _Schema
    """The JSON schema of the allowed values."""
    section: type[BaseModel] | None
    """The group of settings under this key; None for a single value."""

    @property
    def expected(self) -> str:
        """The allowed values, in words."""
        if (rule := self.table) is not None:
            return rule.expected
        words = in_words(self.schema)
        return words.replace("texts", "paths").replace("text", "a path") if self.is_place else words

    @property
    def expected_item(self) -> str:
        """The allowed values of each item of a list, in words."""
        return next(in_words(one["items"]) for one in _options(self.schema) if "items" in one)

    @property
    def choices(self) -> list[str]:
        """The texts that the setting accepts, if it has a fixed choice; otherwise none."""
        return choices(self.schema) if self.table is None else list(self.table.table)

    @property
    def table(self) -> NamedFunction | None:
        """The table whose names the setting accepts, or None for any other setting."""
        return next((one for one in self.field.metadata if isinstance(one, NamedFunction)), None)

    @property
    def operational(self) -> bool:
        """Whether the setting may change when a run is attached again."""
        return OPERATIONAL in self.field.metadata or self.for_workers

    @property
    def for_workers(self) -> bool:
        """Whether workers read this operational setting."""
        return FOR_WORKERS in self.field.metadata

    @property
    def names_input(self) -> bool:
        """Whether the setting is the path of an input, whose content is part of the identity."""
        return INPUT in self.field.metadata

    @property
    def is_place(self) -> bool:
        """Whether the setting is a path or URI, or a list of them."""
        return PLACE in self.field.metadata

    @property
    def is_text(self) -> bool:
        """Whether the setting is a text or a list of texts, and never a number or a switch."""
        return _is_text(self.schema)

    @property
    def default(self) -> Any:
        """The setting's default; PydanticUndefined for a required setting."""
        return self.field.get_default(call_default_factory=True, validated_data={})


@cache
def all_keys() -> dict[str, Key]:
    """Return all groups and settings by dotted key, in the order of the tree."""
    schema = RunConfig.model_json_schema()
    groups = {**schema["$defs"], RunConfig.__name__: schema}
    return {key.name: key for key in _walk(RunConfig, "", groups)}


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


def in_words(schema: _Schema) -> str:
    """Return the values that a JSON schema allows, in words, such as `an integer >= 1 or null`."""
    if "anyOf" in schema:
        return " or ".join(map(in_words, schema["anyOf"]))
    if item := schema.get("items"):
        plural = None if choices(item) else _PLURALS.get(item.get("type"))
        words = f"a list of {plural + _bounds(item) if plural else f'items, each {in_words(item)}'}"
    elif names := choices(schema):
        words = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    elif schema.get("type") == "array":
        words = "a list"
    else:
        words = _NAMES.get(schema.get("type", ""), "a group of settings")
    return words + _bounds(schema)


def choices(schema: _Schema) -> list[str]:
    """Return the texts that a JSON schema with a fixed choice allows; none for other schemas."""
    names = [
        str(name) for name in schema.get("enum", [schema["const"]] if "const" in schema else [])
    ]
    below = [*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]
    return names + [name for one in below for name in choices(one)]


def _bounds(schema: _Schema) -> str:
    text = " and".join(
        f" {sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema
    )
    if "pattern" in schema:
        text += f" matching {schema['pattern']}"
    for least, most, form in (
        ("minLength", "maxLength", " of {} characters"),
        ("minItems", "maxItems", ", with {} items"),
    ):
        if {least, most} <= schema.keys():
            low, high = schema[least], schema[most]
            text += form.format(low if low == high else f"{low} to {high}")
    return text


def _options(schema: _Schema) -> list[_Schema]:
    """Return the schemas of the values other than null."""
    return [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]


def _is_text(schema: _Schema) -> bool:
    return all(
        _is_text(one["items"]) if "items" in one else one.get("type") == "string"
        for one in _options(schema)
    )


def _walk(section: type[BaseModel], prefix: str, groups: _Schema) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        below = _section_of(field.annotation)
        yield Key(prefix + name, field, groups[section.__name__]["properties"][name], below)
        if below is not None:
            yield from _walk(below, f"{prefix}{name}.", groups)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for option in typing.get_args(annotation) or (annotation,):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None
