"""The base class of every group of settings, and the marks of fields."""

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict, JsonValue

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
