"""What every group of settings is, and how a field is marked."""

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict

OPERATIONAL: JsonDict = {"operational": True}
INPUT: JsonDict = {"input": True}


class Section(BaseModel):
    """A group of settings: frozen, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
