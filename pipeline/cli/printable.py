"""Makes stored text safe to display: ids, reasons and errors must not move the cursor.

Commands pass all text that comes from a store, a log or a user's file through this module.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from rich.table import Table
from rich.text import Text

_T = TypeVar("_T")

_NUMBER = 16
"""Maximum number of characters of a number."""
_LONG_WORD = re.compile(r"\S{4097,}")
"""A word that is longer than any valid id, even if all its characters are escaped."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str, keep: str = "") -> str:
    """Return the text with every invisible character replaced by an escape, such as '\\x1b'.

    Invisible characters are control characters, overrides of the text direction, line and paragraph
    separators, white space other than the space, and halves of surrogate pairs. Characters in
    `keep` stay unchanged.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def printable_message(text: str, keep: str = "") -> str:
    """Return printable text whose very long words are cut off, for messages, ids and reasons.

    A damaged id can have a million characters. rich takes minutes to print these.
    """
    return _LONG_WORD.sub(_cut_off, printable(text, keep))


def _cut_off(word: re.Match[str]) -> str:
    return f"{word[0][:100]}... ({len(word[0]):,} characters)"


def printable_line(text: str) -> str:
    """Return a line of a log as printable text, without colours and without overwritten parts."""
    last = text.rstrip("\r").rpartition("\r")[2]
    return printable(_COLOUR.sub("", last), keep="\t")


def number_text(value: float | None, form: str) -> str:
    """Return a number in the format `form`, or with an exponent if it would be too long.

    An unknown number (None) becomes an em dash.
    """
    if value is None:
        return "—"
    text = format(value, form)
    return text if len(text) <= _NUMBER else format(value, ".3g")


def stored_table(
    items: Iterable[_T],
    columns: Mapping[str, Callable[[_T], str]],
    left: Collection[str],
    title: str | None = None,
    **look: Any,
) -> Table:
    """Return a table of stored text: title and cells are printable, and markup in them is ignored.

    Args:
        items: What the rows are about.
        columns: Functions that return an item's cells, keyed by header.
        left: The headers of the columns that are aligned to the left.
        title: A line above the table, or None.
        **look: Further options of rich's Table.
    """
    heading = None if title is None else Text(printable_message(title))
    table = Table(title=heading, title_justify="left", **look)
    for header in columns:
        table.add_column(header, justify="left" if header in left else "right", overflow="fold")
    for item in items:
        table.add_row(*(Text(printable_message(cell(item))) for cell in columns.values()))
    return table


def listing(
    items: Iterable[_T], columns: Mapping[str, Callable[[_T], str]], left: Collection[str]
) -> Table:
    """Return a table without lines; see `stored_table` for the arguments."""
    return stored_table(items, columns, left, box=None, pad_edge=False, padding=(0, 2, 0, 0))
