"""A case of the campaign."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Place = Callable[[Path], None]
"""A function that creates something other than a regular file at an unused path."""
Changes = Mapping[str, bytes | Place | None]
"""The change to each object, keyed by its key: new bytes, a Place, or None for a lost object."""

NAMED = "verify names it"
HARMLESS = "the content is the same, so readers and verify accept it"
NOT_NOTICED = "it cannot be detected"
FREE = "readers must be right; verify may report a problem"

_WRITE_ID = re.compile(r"\.[0-9a-f]{8}\.")


@dataclass(frozen=True)
class Case:
    """One change to an undamaged world, and the expected reaction.

    Example: Case('json/r3:steps/000000/manifest.json:step/null/L0', 'r3', make).
    """

    name: str
    """family/object/what/level."""
    world: str
    make: Callable[[], Changes | None]
    """Returns the changed objects, or None if the case is impossible or changes nothing."""
    expect: str = NAMED

    @property
    def family(self) -> str:
        """The case's family: the first part of its name."""
        return self.name.split("/", 1)[0]

    @property
    def level(self) -> str:
        """The level, L0 or L1."""
        return self.name[-2:]


def title(key: str) -> str:
    """Return a key with `*` for the write id, which differs between versions of the writer."""
    return _WRITE_ID.sub(".*.", key)
