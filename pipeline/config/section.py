"""The base class of all groups of settings, and the marks of their fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from pipeline.rl.custom import custom_function
from pipeline.store import place_text


class Mark(Enum):
    """The part of a setting in a run's identity, unless the setting itself is part of it."""

    OPERATIONAL = "may change when a run is attached again"
    FOR_WORKERS = "operational, and workers read it from attempts/NNN.json"
    INPUT = "names an input, whose content is part of the identity in place of its path"


OPERATIONAL, FOR_WORKERS, INPUT = Mark


Count = Annotated[int, Ge(1)]
"""The type of settings that count or number something, from 1."""
Share = Annotated[float, Gt(0), Le(1)]
"""The type of settings that are a part of a whole; 1 is the whole."""


class Section(BaseModel):
    """A frozen group of settings.

    Unknown keys, values of the wrong type, infinite numbers and NaN are refused.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )


@dataclass(frozen=True)
class NamedFunction:
    """The rule for a text that names either a row of a table or a function in a user's file."""

    table: Mapping[str, object]

    @property
    def expected(self) -> str:
        """The allowed values, in words."""
        return f"one of {', '.join(self.table)}, or path/to/file.py:function"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Validate the text after pydantic has checked its type."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: str) -> str:
        if value not in self.table and custom_function(value) is None:
            raise ValueError(f"expected {self.expected}")
        return value


class _Place:
    """The rule for a path or URI: not empty, and without `~` and variables once it is read."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Expand the text, or each text of a list, after pydantic has checked its type."""
        return core_schema.no_info_after_validator_function(self._expanded, handler(source))

    def _expanded(self, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list):
            return [place_text(one) for one in value]
        return None if value is None else place_text(value)


PLACE = _Place()
"""Marks a setting that names a file or folder, or several, by path or URI."""
