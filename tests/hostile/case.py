"""A case of the campaign."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Place = Callable[[Path], None]
"""Puts something else than a regular file at a path that is free."""
Changes = Mapping[str, bytes | Place | None]
"""By key: new bytes, something odd, or None for a lost object."""

NAMED = "verify names it"
HARMLESS = "it says the same, so readers and verify take it"
NOT_NOTICED = "nobody can notice it"
FREE = "readers must be right; verify may say something"

_WRITE_ID = re.compile(r"\.[0-9a-f]{8}\.")


@dataclass(frozen=True)
class Case:
    """Example: Case('json/r3:steps/000000/manifest.json:step/null/L0', 'r3', make)."""

    name: str
    """family/object/what/level."""
    world: str
    make: Callable[[], Changes | None]
    """The changed objects; None: this case is not possible, or changes nothing."""
    expect: str = NAMED

    @property
    def family(self) -> str:
        """What its cases have in common."""
        return self.name.split("/", 1)[0]

    @property
    def level(self) -> str:
        """L0 or L1."""
        return self.name[-2:]


def title(key: str) -> str:
    """A key without write ids, which differ between versions of the writer."""
    return _WRITE_ID.sub(".*.", key)
