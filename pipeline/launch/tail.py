"""The lines of a worker's log that say why it ended."""

import re

LINES = 25
"""Shown of a log, at most."""

_TORCHRUN_REPORT = re.compile(r"torch[./]distributed[./]elastic")


def last_lines(text: str) -> str:
    """The end of a log, each line marked as quoted."""
    lines = text.splitlines()
    # torchrun's own report of how its ranks ended, long and without the cause, comes last.
    report = [i for i, line in enumerate(lines) if _TORCHRUN_REPORT.search(line)]
    lines = lines[: report[0] if report else None]
    errors = [i for i, line in enumerate(lines) if " ERROR " in line]
    lines = lines[errors[0] if errors else 0 :][-LINES:]
    return "\n".join(f"  | {line}" for line in lines)
