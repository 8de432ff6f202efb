"""The one error for what a user gave us: settings, files, data."""

from collections.abc import Sequence


class InputError(Exception):
    """Settings or files that cannot be used; raised before anything starts.

    `problems` holds every problem that was found, not only the first. Each names the key or the
    file, what was found, what is expected, and the fix.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))
