"""Stored text on a terminal: ids, reasons and errors are data, and none of it moves the cursor.

Whatever a command prints that came from a store, a log or a file of others goes through here.
"""

import re
from typing import Any

from rich.table import Table
from rich.text import Text

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str, keep: str = "") -> str:
    """The text with every character that is not one to see as an escape: '\\x1b', '\\u202e'.

    These are control characters, overrides of the direction, line and paragraph separators, odd
    blanks, halves of surrogate pairs. Those in `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def printable_line(text: str) -> str:
    """The same for a line of a log, without its colours and what a return overwrote."""
    last = text.rstrip("\r").rpartition("\r")[2]
    return printable(_COLOUR.sub("", last), keep="\t")


class StoredTable(Table):
    """A table whose title and cells are stored text: printable, and without rich's markup."""

    def __init__(self, *headers: Any, title: str | None = None, **options: Any) -> None:
        shown = None if title is None else Text(printable(title))
        super().__init__(*headers, title=shown, **options)

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row of texts."""
        super().add_row(*(Text(printable(cell)) for cell in cells), **options)
