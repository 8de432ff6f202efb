"""The check of a Prefect server's log finds errors and tracebacks."""

import pytest

from tests import prefect_log
from tests.prefect_log import check_log, unexpected_errors

USUAL = """
 ___ ___ ___ ___ ___ ___ _____
| _ \\ _ \\ __| __| __/ __|_   _|
Configure Prefect to communicate with the server with:
09:10:30.002 | INFO    | prefect.server.services - Scheduled 3 runs, 0 ERROR
INFO:     Uvicorn running on http://127.0.0.1:4200 (Press CTRL+C to quit)
"""
LOCKED = """\
09:10:31.002 | ERROR   | docket.dependencies - mark_deployments_ready(work_queue_ids=...)
Traceback (most recent call last):
  File "base.py", line 1967, in _exec_single_context
sqlite3.OperationalError: database is locked
"""
ASGI = "ERROR:    Exception in ASGI application\n"
WARNED = "09:10:32.500 | WARNING | prefect - retrying\nTraceback (most recent call last):\n  ...\n"


def test_errors_and_tracebacks_are_found():
    assert unexpected_errors(USUAL) == []
    assert unexpected_errors(USUAL + LOCKED + ASGI + WARNED) == [LOCKED, ASGI, WARNED]
    with pytest.raises(AssertionError, match="database is locked"):
        check_log(USUAL + LOCKED)


def test_expected_errors_are_ignored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefect_log, "EXPECTED", {r"mark_deployments_ready\(": "a test"})
    assert unexpected_errors(LOCKED + ASGI) == [ASGI]
