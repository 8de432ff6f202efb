"""The error for unusable input (settings, files, data), and the base class of lasting errors."""

import difflib
from collections.abc import Iterable, Sequence


def shown(value: object) -> str:
    """Return a setting's value as text for a message: `null` for None, otherwise Python's repr."""
    return "null" if value is None else repr(value)


def cut(value: object) -> str:
    """Return a stored value as text for a message, cut off after 100 characters."""
    text = shown(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def nearest(text: object, options: Iterable[str], otherwise: str = "leave it out") -> str:
    """Return the fix for a wrong text.

    Args:
        text: The wrong text; no option is similar to a value of another type.
        options: The allowed texts.
        otherwise: The fix if no option is similar.
    """
    close = difflib.get_close_matches(str(text), list(options), 1)
    return f"did you mean {close[0]}?" if close else otherwise


class LastingError(Exception):
    """An error that would recur after a restart, so the launcher does not restart the worker.

    Subclasses report, for example, damaged or unusable input, a reward function that raises, or
    a store that is full or refuses its credentials.
    """


class InputError(LastingError):
    """Unusable settings or files, found before anything starts.

    `problems` contains all problems, not only the first. Each names the key or file, the value
    found, the value expected, and the fix. `notes` contains facts that are not problems but should
    be shown, such as keys without effect.
    """

    def __init__(self, problems: Sequence[str], notes: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        self.notes = tuple(notes)
        super().__init__("\n".join(self.problems))
