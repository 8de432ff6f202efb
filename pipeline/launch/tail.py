"""Why a worker ended, read from its log."""

import re

LINES = 25
"""The most lines of a log that are shown."""

_TORCHRUN_REPORT = re.compile(r"torch[./]distributed[./]elastic")
_RANK_EXIT = re.compile(r"exitcode\s*:\s*(-?\d+)")


def last_lines(text: str) -> str:
    """The end of a log, each line marked as quoted."""
    lines = text.splitlines()
    # torchrun ends with a long report of how its ranks ended, which does not name the cause.
    report = [i for i, line in enumerate(lines) if _TORCHRUN_REPORT.search(line)]
    lines = lines[: report[0] if report else None]
    errors = [i for i, line in enumerate(lines) if " ERROR " in line]
    lines = lines[errors[0] if errors else 0 :][-LINES:]
    return "\n".join(f"  | {line}" for line in lines)


def rank_exit_codes(text: str) -> set[int]:
    """Exit codes of the ranks that failed, from torchrun's report in a log; -9 for SIGKILL.

    torchrun itself ends with 1. Ranks that it ended because another failed are not in its report.
    """
    return {int(code) for code in _RANK_EXIT.findall(text)}
