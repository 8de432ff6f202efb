"""Waiting for objects: what is there is found at once, what never comes is named."""

import pytest

from pipeline.run.wait import WaitTimeoutError, wait_for_any
from tests.memory_store import MemoryStore
from tests.patience import PATIENCE_S


def test_the_earliest_of_the_list_wins():
    store = MemoryStore({"b": b"", "c": b""})
    assert wait_for_any(store, ["a", "b", "c"], 0, "nobody") == "b"


def test_what_never_comes_is_named_with_its_maker():
    with pytest.raises(WaitTimeoutError, match=r"waited 0 s for a or b in .*; worker 3 should"):
        wait_for_any(MemoryStore(), ["a", "b"], 0, "worker 3")


def test_an_object_that_comes_meanwhile_is_found():
    store = MemoryStore()

    def meanwhile() -> bool:
        store.objects["a"] = b""
        return False

    assert wait_for_any(store, ["a"], PATIENCE_S, "nobody", meanwhile) == "a"


def test_who_is_told_to_wait_starts_the_time_anew():
    """Without a second of its own: each look says that the worker is queued."""
    store, looks = MemoryStore(), iter([True, True, False])
    with pytest.raises(WaitTimeoutError):
        wait_for_any(store, ["a"], 0.01, "nobody", lambda: next(looks))
    assert next(looks, None) is None


def test_meanwhile_may_give_up():
    def give_up() -> bool:
        raise RuntimeError("the worker died")

    with pytest.raises(RuntimeError, match="the worker died"):
        wait_for_any(MemoryStore(), ["a"], PATIENCE_S, "nobody", give_up)
