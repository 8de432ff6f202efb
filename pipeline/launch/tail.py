"""Why workers ended, read from their logs.

Of several ranks only one meets the cause; the others meet its end ("Connection closed by peer").
The first to fail is quoted, and the others are named after it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.exits import RANK_FAILED

LINES = 25
"""The most lines of a log that are shown."""

_ECHO_WIDTH = 160
"""Characters that are shown of what followed from the cause."""

_TORCHRUN_REPORT = re.compile(r"torch[./]distributed[./]elastic")
_RANK_EXIT = re.compile(r"exitcode\s*:\s*(-?\d+)")
_RANK_OF_EXIT = re.compile(r"^\s*rank\s*:\s*(\d+).*\n\s*exitcode\s*:\s*(-\d+)", re.MULTILINE)
_TIME = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})"
_RECORD = re.compile(_TIME + r" ERROR \S+ " + RANK_FAILED % (r"(\d+)", "(.*)"))
_OTHER_RECORD = re.compile(
    rf"{_TIME} [A-Z]+ |[EWI]\d{{4}} \d\d:\d\d|.*torch[./]distributed[./]elastic"
)
_ECHO = re.compile(
    "connection (was )?(closed|reset)|closed by peer|broken pipe|remote process exited"
    "|Dist(Network|Store|Backend)Error|NCCL|socket",
    re.IGNORECASE,
)
"""What a rank says that has lost another one. It may say so before the other's clock has the time
at which that one failed."""


@dataclass(frozen=True)
class _RankFailure:
    """How a rank ended, from its own line in a log or from torchrun's report."""

    is_echo: bool
    time: str
    """Of the line; empty for a rank that was killed, and so wrote none."""
    rank: int
    what: str
    log: int
    """Index of the log that says so."""
    lines: tuple[str, ...]
    """Its line of the log with the traceback below; none for a rank that was killed."""


def why_ended(logs: Sequence[str]) -> str:
    """Why the processes with these logs ended: the quoted cause, then what followed from it.

    Without a line of a rank it is the first error of the first log and the log's end.
    """
    failures = _failures(logs)
    if not failures:
        return last_lines(logs[0]) if logs else ""
    first, *others = failures
    cause = _quoted(_shortened(first.lines)) if first.lines else f"rank {first.rank}: {first.what}"
    echoes = [f"rank {one.rank} then ended: {one.what[:_ECHO_WIDTH]}" for one in others]
    return "\n".join([cause, *echoes])


def failed_first(logs: Sequence[str]) -> int | None:
    """Index of the log with the cause; None if no log has a rank's line about its end."""
    return next((failure.log for failure in _failures(logs)), None)


def last_lines(text: str) -> str:
    """The first error of a log and the log's end, each line marked as quoted."""
    lines = text.splitlines()
    # torchrun ends with a long report of how its ranks ended, which does not name the cause.
    report = [i for i, line in enumerate(lines) if _TORCHRUN_REPORT.search(line)]
    lines = lines[: report[0] if report else None]
    errors = [i for i, line in enumerate(lines) if " ERROR " in line]
    return _quoted(_shortened(lines[errors[0] :]) if errors else lines[-LINES:])


def rank_exit_codes(text: str) -> set[int]:
    """Exit codes of the ranks that failed, from torchrun's report in a log; -9 for SIGKILL.

    torchrun itself ends with 1. Ranks that it ended because another failed are not in its report.
    """
    return {int(code) for code in _RANK_EXIT.findall(text)}


def _failures(logs: Sequence[str]) -> list[_RankFailure]:
    """How ranks ended, the cause first."""
    found = [failure for index, text in enumerate(logs) for failure in _recorded(index, text)]
    told = {failure.rank for failure in found}
    for index, text in enumerate(logs):
        for rank, code in _RANK_OF_EXIT.findall(text):
            if int(rank) not in told:
                what = f"killed by signal {-int(code)}"
                found.append(_RankFailure(False, "", int(rank), what, index, ()))
    causes = [failure for failure in found if not failure.is_echo and failure.time]
    # A rank that was killed has no time: it is the cause where all that others say is an echo.
    return sorted(
        found,
        key=lambda one: (one.is_echo or (not one.time and bool(causes)), one.time, one.rank),
    )


def _recorded(index: int, text: str) -> list[_RankFailure]:
    """The ranks' own lines of a log."""
    lines = text.splitlines()
    found = []
    for number, line in enumerate(lines):
        record = _RECORD.match(line)
        if record is None:
            continue
        time, rank, what = record.groups()
        end = number + 1
        while end < len(lines) and not _OTHER_RECORD.match(lines[end]):
            end += 1
        of_rank = tuple(lines[number:end])
        found.append(_RankFailure(bool(_ECHO.search(what)), time, int(rank), what, index, of_rank))
    return found


def _shortened(lines: Sequence[str]) -> list[str]:
    """The first line, and as many of the last ones as are shown."""
    return [*lines[:1], *lines[1:][-(LINES - 1) :]]


def _quoted(lines: Sequence[str]) -> str:
    return "\n".join(f"  | {line}" for line in lines)
