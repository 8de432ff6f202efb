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


@given(
    sizes=st.lists(st.integers(0, 9), max_size=30),
    limit=st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_items_are_processed_in_order_within_the_limit(sizes, limit):
    """The waiting items and the item in progress together never exceed the limit.

    The only exception is an item that is larger than the limit, which is accepted on its own.
    """
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


def test_put_waits_only_while_the_limit_is_exceeded():
    """The limit is 8 bytes, so two items of 4 bytes fit while the thread is busy.

    A third item waits until one of them is done.
    """
    begun, go = threading.Event(), threading.Semaphore(0)
    done = []

    def work(item):
        begun.set()
        go.acquire(timeout=10)
        done.append(item)

    with Handover(work, 8, "test") as handover:
        handover.put("a", 4)
        handover.put("b", 4)
        assert begun.wait(10)
        assert (done, handover.held_bytes, handover.blocked_s) == ([], 8, 0.0)
        release = threading.Timer(0.05, go.release, (2,))
        release.start()
        handover.put("c", 4)
        assert done[0] == "a"
        assert handover.held_bytes <= 8
        assert handover.blocked_s > 0
        go.release()
        handover.finish()
    assert done == ["a", "b", "c"]


def test_an_item_larger_than_the_limit_is_processed_alone():
    done = []
    with Handover(done.append, 8, "test") as handover:
        handover.put("small", 1)
        handover.put("large", 100)
        assert done == ["small"]
        handover.finish()
    assert done == ["small", "large"]


@pytest.mark.parametrize("late", [False, True])
def test_an_error_is_raised_in_the_thread_that_puts_items(late):
    """The next `put` raises the exception object that the writer's thread raised.

    If no item follows, `finish` raises it.
    """
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
