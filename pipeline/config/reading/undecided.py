"""What `retrace import-verl` left to be decided, as comments of the file that it wrote."""

import re
from pathlib import Path
from typing import Any

from pipeline.config.dotted import ABSENT, get
from pipeline.config.reading.spellings import our_spelling

IMPORTED = "# Settings of a Retrace run, imported from verl's"
"""How the first line of such a file begins."""
TODO = "# TODO "
"""What a dotted key and its value in verl stand behind."""
UNKNOWN = "..."
"""The value of a setting that must be added; the reader of settings refuses the file without it."""

_LINE = re.compile(rf"^\s*{TODO}(?P<key>[\w.-]+): (?P<value>.*)$")


def undecided(path: Path, settings: dict[str, Any]) -> list[str]:
    """A problem for each line that says what is to be decided, unless its key has a value by now.

    Without it the run would silently go by our default, or without what verl would have done.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0].startswith(IMPORTED):
        return []
    found = [(number, _LINE.match(line)) for number, line in enumerate(lines, start=1)]
    return [
        f"{path}, line {number}: {todo['key']} is to be decided; write the setting in place of the "
        "line or on the command line, or remove the line to go on without it"
        for number, todo in found
        if todo is not None
        and todo["value"] != UNKNOWN
        and get(settings, todo["key"]) is get(settings, our_spelling(todo["key"])) is ABSENT
    ]
