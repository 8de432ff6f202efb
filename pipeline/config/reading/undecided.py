"""Settings that `retrace import-verl` left to the user, as comments in the file that it wrote."""

import re
from pathlib import Path
from typing import Any

from pipeline.config.dotted import ABSENT, get
from pipeline.config.reading.spellings import our_spelling

IMPORTED = "# Settings of a Retrace run, imported from verl's"
"""The start of the first line of an imported file."""
TODO = "# TODO "
"""The start of a TODO line, which continues with a dotted key and its value in verl."""
UNKNOWN = "..."
"""The placeholder for a setting that must be added; until it is added, the file is refused."""

_LINE = re.compile(rf"^\s*{TODO}(?P<key>[\w.-]+): (?P<value>.*)$")


def undecided(path: Path, settings: dict[str, Any]) -> list[str]:
    """Return a problem for each TODO line whose key has no value yet.

    Without this check, the run would silently use our default, or lack an effect that the setting
    has in verl.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0].startswith(IMPORTED):
        return []
    found = [(number, _LINE.match(line)) for number, line in enumerate(lines, start=1)]
    return [
        f"{path}, line {number}: {todo['key']} is undecided; {_fix(todo['key'])}"
        for number, todo in found
        if todo is not None
        and todo["value"] != UNKNOWN
        and get(settings, todo["key"]) is get(settings, our_spelling(todo["key"])) is ABSENT
    ]


def _fix(key: str) -> str:
    if "." not in key:  # an environment variable
        return (
            "the comment below the line names what reads this variable; decide, and remove the line"
        )
    return (
        "replace the line with the setting, give the setting on the command line, or remove the "
        "line to run without the setting"
    )
