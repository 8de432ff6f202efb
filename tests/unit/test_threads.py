"""Overlapping calls: the order of their results, the error that is raised, and the limit on how
many calls overlap."""

import threading
import time

import pytest

from pipeline.threads import in_order


def test_results_keep_the_order_of_the_items_and_few_are_ahead():
    """Later items finish first. Results that the caller has not yet taken count as ahead."""
    begun, taken, most = [], 0, 0

    def work(item: int) -> int:
        begun.append(item)
        time.sleep(0.001 * (item % 4 == 0))
        return item * item

    for result in in_order(work, range(40), at_once=5):
        assert result == taken * taken
        most = max(most, len(begun) - taken)
        taken += 1
    assert taken == 40
    assert 1 < most <= 5


def test_items_are_processed_simultaneously():
    """Each item waits for three others, so none would finish if the items were processed in
    turn."""
    together = threading.Barrier(4, timeout=60)
    assert len(list(in_order(lambda _: together.wait(), range(8), at_once=4))) == 8


def test_the_error_of_the_first_failing_item_follows_the_earlier_results():
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        if item in (2, 3):
            time.sleep(0.01 * (3 - item))  # the later one fails first
            raise ValueError(f"item {item}")
        return item

    results = in_order(work, range(1000), at_once=3)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="item 2"):
        next(results)
    assert len(begun) < 10


def test_no_more_items_begin_after_the_caller_stops():
    begun = []
    for _ in in_order(begun.append, range(1000), at_once=3):
        break
    assert len(begun) <= 3


def test_no_items_give_no_results():
    assert list(in_order(str, [])) == []
