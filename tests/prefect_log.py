"""The errors in the log of a Prefect server."""

import re

EXPECTED = {
    "(?s)Worker channel heartbeat persistence failed.*database is locked": (
        "On SQLite, a heartbeat of the worker may collide with another writer on a busy machine. "
        "The next heartbeat follows after 30 s, and the worker counts as offline only after 90 s."
    ),
    "(?s)Encountered error during state validation.*database is locked": (
        "On SQLite, a change of state may collide with a writer on a busy machine. The client "
        "asks again, and the tests check the states."
    ),
    "(?s)Exception in ASGI application.*database is locked.*INSERT INTO worker ": (
        "As for the worker's heartbeat, which arrives here as a request that the worker repeats."
    ),
    "(?s)evaluate_proactive_triggers.*Trigger._automation has been garbage collected": (
        "Prefect refers weakly to an automation while it evaluates its triggers. The next "
        "evaluation follows seconds later."
    ),
    "(?s)event_persister - .*NOT NULL constraint failed: events.occurred": (
        "After a restart of the server, the same events may arrive again. On SQLite, a batch whose "
        "events are all stored already fails, and dropping the batch loses nothing."
    ),
}
"""The reason for each error that may occur, keyed by a pattern that its record contains."""

_RECORD = re.compile(r"^(?=\d\d:\d\d:\d\d\.\d+ \| |(?:INFO|WARNING|ERROR|CRITICAL): )", re.M)
_ERROR = re.compile(
    r"^\S+ \| (?:ERROR|CRITICAL)|^(?:ERROR|CRITICAL): |^Traceback \(most recent call last\)", re.M
)


def unexpected_errors(log: str) -> list[str]:
    """Return the records that report an error or contain a traceback, without the expected ones."""
    return [
        record
        for record in _RECORD.split(log)
        if _ERROR.search(record) and not any(re.search(known, record) for known in EXPECTED)
    ]


def check_log(log: str) -> None:
    """Fail if a server's log contains an unexpected error."""
    found = unexpected_errors(log)
    assert not found, f"{len(found)} errors in the Prefect server's log:\n" + "".join(found)[:8000]
