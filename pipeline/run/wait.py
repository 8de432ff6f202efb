"""Waiting for objects: polling that backs off while idle, with a deadline."""

import time
from collections.abc import Callable, Sequence

from pipeline.store.base import Store

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


class WaitTimeoutError(Exception):
    """An awaited object did not appear; the text names it and its expected maker."""


def wait_for_any(
    store: Store,
    keys: Sequence[str],
    timeout_s: float,
    maker: str,
    meanwhile: Callable[[], bool] = lambda: False,
) -> str:
    """Wait until one of the keys exists and return it; the earliest in the list wins.

    `maker` names their expected maker ("rollout worker 3") in the error. `meanwhile` is called
    between polls and may raise to give up (a dead worker, a cancelled run). Whenever it returns
    True (the worker is queued for a node), the time starts anew.
    Raises WaitTimeoutError after `timeout_s` seconds.
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
                f"{maker} should have made it: look at its log, or raise "
                "launch.step_timeout_s"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, _LONGEST_PAUSE_S)
