"""The one error for a user's input: settings, files, data."""

from collections.abc import Sequence


class InputError(Exception):
    """Unusable settings or files, found before anything starts.

    `problems` holds all problems, not only the first. Each names the key or the file, what was
    found, what was expected, and the fix. `notes` holds facts that are not problems but should be
    shown, such as keys without effect.
    """

    def __init__(self, problems: Sequence[str], notes: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        self.notes = tuple(notes)
        super().__init__("\n".join(self.problems))
