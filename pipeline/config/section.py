"""The base class of every group of settings, and the marks of fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic.config import JsonDict, JsonValue
from pydantic_core import CoreSchema, core_schema

from pipeline.rl.custom import custom_function

OPERATIONAL: JsonDict = {"operational": True}
FOR_WORKERS: JsonDict = {"operational": True, "for_workers": True}
"""Mark of an operational setting that workers read, from attempts/NNN.json."""
INPUT: JsonDict = {"input": True}


def formerly(value: JsonValue) -> JsonDict:
    """Mark of a setting that is newer than some runs, with the value of those older runs."""
    return {"formerly": value}


class Section(BaseModel):
    """A group of settings: frozen, no unknown keys, no silent conversion of types, no infinity."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )


@dataclass(frozen=True)
class NamedFunction:
    """The rule of a text that names a row of a table, or a user's function in a file of theirs."""

    table: Mapping[str, object]

    @property
    def expected(self) -> str:
        """The allowed values, in words."""
        return f"one of {', '.join(self.table)}, or path/to/file.py:function"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Check the text after it was found to be one."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: str) -> str:
        if value not in self.table and custom_function(value) is None:
            raise ValueError(f"expected {self.expected}")
        return value
