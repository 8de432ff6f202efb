"""Functions that wait for objects: they poll the store at growing intervals, up to a deadline."""

import time
from collections.abc import Callable, Sequence

from pipeline.store.base import Store
from pipeline.threads import AT_ONCE, in_order

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


class WaitTimeoutError(Exception):
    """An awaited object did not appear. The message names the object and its expected maker."""


def wait_for_any(
    store: Store,
    keys: Sequence[str],
    timeout_s: float,
    maker: str,
    meanwhile: Callable[[], bool] = lambda: False,
) -> str:
    """Wait until one of several objects exists.

    Args:
        store: The run.
        keys: The objects' keys. If several objects exist, the first one in this order is returned.
        timeout_s: Seconds to wait.
        maker: The expected maker of the objects ("rollout worker 3"), for the error.
        meanwhile: Called between polls. It may raise an exception to end the wait, for example if
            the worker died or the run was cancelled. Whenever it returns True (for example, because
            the worker is still queued for a node), the timeout starts again.

    Returns:
        The key of the object that exists.

    Raises:
        WaitTimeoutError: No object appeared within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        for key in keys:
            if store.size(key) is not None:
                return key
        if meanwhile():
            deadline = time.monotonic() + timeout_s
        if time.monotonic() >= deadline:
            raise WaitTimeoutError(
                f"waited {timeout_s:.0f} s for {' or '.join(keys)} in {store.uri}; "
                f"{maker} should have written the object: check its log, or increase "
                "launch.step_timeout_s"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, _LONGEST_PAUSE_S)


def wait_for_all(store: Store, keys: Sequence[str], wait: Callable[[int], object]) -> None:
    """Wait until all objects exist.

    Up to AT_ONCE keys are checked in parallel. While `wait` waits for one object, the other keys
    are not polled.

    Args:
        store: The run.
        keys: The objects' keys.
        wait: Waits for the first missing object, whose index in `keys` is passed to it.

    Raises:
        StoreError: The store failed. Errors raised by `wait` are passed on unchanged.
    """
    missing: list[int] = []
    later = list(range(len(keys)))
    while missing or later:
        room = AT_ONCE - len(missing)
        looked, later = later[:room], later[room:]
        if not looked:
            wait(missing[0])
            missing, looked = [], missing[1:]
        sizes = in_order(store.size, [keys[number] for number in looked])
        missing += [one for one, size in zip(looked, sizes, strict=True) if size is None]
