"""The one error for a user's input (settings, files, data), and what no restart mends."""

from collections.abc import Sequence


def shown(value: object) -> str:
    """A setting's value in a message: as Python writes it, but null as users write it."""
    return "null" if value is None else repr(value)


class LastingError(Exception):
    """An error that a restart would meet again, so that none is tried.

    Classes of errors derive from it: damaged or unusable input, a reward function that raises, a
    store that is full or refuses its credentials.
    """


class InputError(LastingError):
    """Unusable settings or files, found before anything starts.

    `problems` holds all problems, not only the first. Each names the key or the file, what was
    found, what was expected, and the fix. `notes` holds facts that are not problems but should be
    shown, such as keys without effect.
    """

    def __init__(self, problems: Sequence[str], notes: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        self.notes = tuple(notes)
        super().__init__("\n".join(self.problems))
