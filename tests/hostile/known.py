"""What nobody can notice, and why; and cases that are still open."""

import re
from collections.abc import Sequence

from tests.hostile.case import NOT_NOTICED, Case

UNNOTICED: dict[str, tuple[Sequence[str], str]] = {}
"""By pattern of names: the fields of a sample that may be other ones, and the reason."""

OPEN: dict[str, str] = {}
"""By pattern of names what is known and not mended yet. Strict: a pattern of which every case that
is tried comes out right must go."""


def not_noticed(case: Case) -> Sequence[str] | None:
    """The fields that may differ unnoticed; None: the case must be noticed."""
    if case.expect == NOT_NOTICED:
        return ()
    for pattern, (fields, _) in UNNOTICED.items():
        if re.search(pattern, case.name):
            return fields
    return None


def open_pattern(name: str) -> str | None:
    """The pattern of OPEN that a case falls under."""
    return next((pattern for pattern in OPEN if re.search(pattern, name)), None)
