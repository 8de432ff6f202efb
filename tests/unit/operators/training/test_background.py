"""Background jobs of a rank run in order, and their errors reach the main thread."""

import threading

import pytest

from operators.training.background import Background
from tests.patience import PATIENCE_S


def fail() -> None:
    raise OSError("the disk is full")


def test_jobs_run_in_order_and_finish_waits_for_all():
    done: list[int] = []
    hold = threading.Event()

    def first() -> None:
        hold.wait(PATIENCE_S)
        done.append(1)

    with Background() as background:
        background.submit("first", first)
        background.submit("second", lambda: done.append(2))
        assert done == []
        hold.set()
        background.finish()
        assert done == [1, 2]


def test_no_job_runs_after_a_failed_one():
    """A step's metrics are not committed if the commit of its policy failed."""
    done: list[int] = []
    hold = threading.Event()

    def hold_and_fail() -> None:
        hold.wait(PATIENCE_S)
        fail()

    with Background() as background:
        background.submit("policy", hold_and_fail)
        background.submit("metrics", lambda: done.append(1))
        hold.set()
        with pytest.raises(OSError, match="the disk is full"):
            background.finish()
        background.finish()
    assert done == []


def test_waiting_for_a_job_does_not_wait_for_later_jobs():
    """A checkpoint waits for the upload of the previous checkpoint, but not for later jobs."""
    hold = threading.Event()

    def removing() -> None:
        hold.wait(PATIENCE_S)

    with Background() as background:
        uploaded = background.submit("uploading", lambda: None)
        background.submit("removing old policies", removing)
        background.wait_for(uploaded)
        hold.set()
        background.finish()
        with pytest.raises(OSError, match="the disk is full"):
            background.wait_for(background.submit("uploading", fail))


def test_an_error_in_the_main_thread_does_not_wait_for_jobs():
    """A job may wait an hour for the share of a rank that also failed."""
    done: list[int] = []
    hold, began = threading.Event(), threading.Event()

    def wait_long() -> None:
        began.set()
        hold.wait()

    def train() -> None:
        with Background() as background:
            background.submit("waits", wait_long)
            background.submit("never runs", lambda: done.append(1))
            began.wait(PATIENCE_S)
            raise ValueError("a rank failed")

    with pytest.raises(ValueError, match="a rank failed"):
        train()
    hold.set()
    assert done == []
