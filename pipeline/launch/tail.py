"""The reason why workers ended, read from their logs.

Usually an error ends only one rank at first. The other ranks then lose their connection to that
rank ("Connection closed by peer"). The text for users quotes the error of the rank that failed
first, and lists the other ranks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.exits import RANK_FAILED

LINES = 25
"""Maximum number of lines to show from a log."""

_ECHO_WIDTH = 160
"""Maximum number of characters to show from an error that another rank's error has caused."""

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
"""Errors from a rank that has lost its connection to another rank.

The clocks of two nodes may differ, so the time of such an error can precede that of the cause.
"""


@dataclass(frozen=True)
class _RankFailure:
    """How a rank ended, according to its own log line or to torchrun's report."""

    is_echo: bool
    """Whether the rank only lost its connection to another rank."""
    time: str
    """Time of the log line; empty for a killed rank, which wrote no line."""
    rank: int
    what: str
    log: int
    """Index of the log that contains the line or report."""
    lines: tuple[str, ...]
    """The rank's log line with its traceback; empty for a killed rank."""


def why_ended(logs: Sequence[str]) -> str:
    """Return why processes ended: the error that was the cause, then the failures that followed.

    If no log names a failed rank, return the first error in the first log, and the end of that log.
    """
    failures = _failures(logs)
    if not failures:
        return last_lines(logs[0]) if logs else ""
    first, *others = failures
    cause = _quoted(_shortened(first.lines)) if first.lines else f"rank {first.rank}: {first.what}"
    echoes = [f"rank {one.rank} then ended: {one.what[:_ECHO_WIDTH]}" for one in others]
    return "\n".join([cause, *echoes])


def failed_first(logs: Sequence[str]) -> int | None:
    """Return the index of the log that contains the cause; None if no log names a failed rank."""
    return next((failure.log for failure in _failures(logs)), None)


def last_lines(text: str) -> str:
    """Return the first error of a log and the log's end, each line marked as quoted."""
    lines = text.splitlines()
    # torchrun ends the log with a long report about its ranks, which does not name the cause.
    report = [i for i, line in enumerate(lines) if _TORCHRUN_REPORT.search(line)]
    lines = lines[: report[0] if report else None]
    errors = [i for i, line in enumerate(lines) if " ERROR " in line]
    return _quoted(_shortened(lines[errors[0] :]) if errors else lines[-LINES:])


def rank_exit_codes(text: str) -> set[int]:
    """Return the exit codes of failed ranks, from torchrun's report in a log; -9 means SIGKILL.

    torchrun itself always exits with 1. Its report omits the ranks that it ended because another
    rank had failed.
    """
    return {int(code) for code in _RANK_EXIT.findall(text)}


def _failures(logs: Sequence[str]) -> list[_RankFailure]:
    """Return how ranks ended, with the cause first."""
    found = [failure for index, text in enumerate(logs) for failure in _recorded(index, text)]
    told = {failure.rank for failure in found}
    for index, text in enumerate(logs):
        for rank, code in _RANK_OF_EXIT.findall(text):
            if int(rank) not in told:
                what = f"killed by signal {-int(code)}"
                found.append(_RankFailure(False, "", int(rank), what, index, ()))
    causes = [failure for failure in found if not failure.is_echo and failure.time]
    # A killed rank wrote no line, so its failure has no time. It counts as the cause if every other
    # failure is an echo.
    return sorted(
        found,
        key=lambda one: (one.is_echo or (not one.time and bool(causes)), one.time, one.rank),
    )


def _recorded(index: int, text: str) -> list[_RankFailure]:
    """Return the failures that ranks report in their own lines of a log."""
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
    """Return the first line, and as many of the last lines as LINES allows."""
    return [*lines[:1], *lines[1:][-(LINES - 1) :]]


def _quoted(lines: Sequence[str]) -> str:
    return "\n".join(f"  | {line}" for line in lines)
