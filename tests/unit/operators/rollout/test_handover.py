"""The transfer of items to the writer's thread: order, memory limit, errors and concurrency.

These tests need no engine. Threads synchronise with events, so nothing depends on timing.
"""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.rollout.handover import Handover


class WrongError(Exception):
    pass


@given(sizes=st.lists(st.integers(0, 9), max_size=30), limit=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_items_are_processed_in_order_within_the_limit(sizes, limit):
    """The waiting items and the item in progress together never exceed the limit."""
    worked, held, most = [], 0, 0
    lock = threading.Lock()

    def work(item):
        nonlocal held
        worked.append(item)
        with lock:
            held -= sizes[item]

    with Handover(work, limit, "test") as handover:
        for item, size in enumerate(sizes):
            with lock:
                held += size
            handover.put(item, size)
            assert handover.held_bytes <= max(limit, size)
            with lock:
                # `put` has returned, so the item fits, or it is larger than the limit and is the
                # only item.
                most = max(most, held)
        handover.finish()
    assert worked == list(range(len(sizes)))
    assert most <= max(limit, *sizes, 0) if sizes else most == 0


@pytest.mark.parametrize("late", [False, True])
def test_an_error_is_raised_in_the_thread_that_puts_items(late):
    """The next `put` raises the exception object that the writer's thread raised."""
    error = WrongError("sample 000001/2/0")

    def work(item):
        if item == "bad":
            raise error

    def hand_over():
        with Handover(work, 100, "test") as handover:
            handover.put("good", 1)
            handover.put("bad", 1)
            if late:
                handover.finish()
            for _ in range(1000):
                handover.put("good", 1)
            handover.finish()

    with pytest.raises(WrongError) as raised:
        hand_over()
    assert raised.value is error


def test_an_error_in_the_with_block_drops_waiting_items():
    """The item in progress is finished, so the writer's thread is idle afterwards."""
    begun, go = threading.Event(), threading.Event()
    done = []

    def work(item):
        begun.set()
        go.wait(10)
        done.append(item)

    def leave():
        with Handover(work, 100, "test") as handover:
            for item in range(5):
                handover.put(item, 1)
            assert begun.wait(10)
            threading.Timer(0.05, go.set).start()
            raise WrongError

    with pytest.raises(WrongError):
        leave()
    assert done == [0]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]
