"""Waiting for objects: an existing object is found immediately, and a missing one is named."""

from collections import Counter

import pytest

from pipeline.run.wait import WaitTimeoutError, wait_for_all, wait_for_any
from pipeline.threads import AT_ONCE
from tests.memory_store import MemoryStore
from tests.patience import PATIENCE_S


def test_a_missing_object_is_named_with_its_maker():
    with pytest.raises(WaitTimeoutError, match=r"waited 0 s for a or b in .*; worker 3 should"):
        wait_for_any(MemoryStore(), ["a", "b"], 0, "worker 3")


def test_an_object_that_appears_meanwhile_is_found():
    store = MemoryStore()

    def meanwhile() -> bool:
        store.objects["a"] = b""
        return False

    assert wait_for_any(store, ["a"], PATIENCE_S, "worker 0", meanwhile) == "a"


def test_meanwhile_may_restart_the_timeout():
    """The timeout is almost 0 s, but it starts again when `meanwhile` reports a queued worker."""
    store, looks = MemoryStore(), iter([True, True, False])
    with pytest.raises(WaitTimeoutError):
        wait_for_any(store, ["a"], 0.01, "worker 0", lambda: next(looks))
    assert next(looks, None) is None


def test_meanwhile_may_end_the_wait():
    def give_up() -> bool:
        raise RuntimeError("the worker died")

    with pytest.raises(RuntimeError, match="the worker died"):
        wait_for_any(MemoryStore(), ["a"], PATIENCE_S, "worker 0", give_up)


class Asked(MemoryStore):
    """Counts the lookups of each key."""

    def __init__(self, objects):
        super().__init__(objects)
        self.asked = Counter()

    def size(self, key):
        self.asked[key] += 1
        return super().size(key)


NAMES = [f"{number:03}" for number in range(5 * AT_ONCE)]


@pytest.mark.parametrize("late", [[0], [79], [3, 40], list(range(80)), list(range(10, 60))])
@pytest.mark.parametrize("together", [1, 7, 80])
def test_each_wait_is_for_the_first_missing_object(late, together):
    """This holds however many objects appear during one wait."""
    store = Asked({name: b"" for number, name in enumerate(NAMES) if number not in late})
    waited = []

    def wait(number: int) -> None:
        missing = [one for one, name in enumerate(NAMES) if name not in store.objects]
        assert number == missing[0]
        waited.append(number)
        store.objects.update((NAMES[one], b"") for one in missing[:together])

    wait_for_all(store, NAMES, wait)
    assert len(store.objects) == len(NAMES)
    assert waited == sorted(set(waited))
    assert set(waited) <= set(late)
    assert sum(store.asked.values()) <= len(NAMES) + AT_ONCE * len(waited)
