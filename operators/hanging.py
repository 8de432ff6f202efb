"""A watchdog that ends a worker whose store hangs.

Requests to S3 have time limits, and a request that keeps failing raises an error. File reads have
no time limit. If the file system hangs, for example because the server of a network mount is gone,
the reading thread waits forever, and so does each thread that waits for it. Therefore a separate
thread checks the duration of the store's operations, and ends the process if one takes too long.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

from pipeline.config.launch import Launch
from pipeline.store.operations import oldest_operation

_PAUSE_S = 1.0
_limit_s = Launch().step_timeout_s


def allow(limit_s: float) -> None:
    """Limit each store operation to `limit_s` seconds (launch.step_timeout_s)."""
    global _limit_s
    _limit_s = limit_s


def watch_store(failed: Callable[[str], None]) -> None:
    """Start the watchdog thread. It passes the error's text to `failed`, which must log it."""
    threading.Thread(target=_watch, args=(failed,), name="watch-store", daemon=True).start()


def _watch(failed: Callable[[str], None]) -> None:
    while True:
        time.sleep(_PAUSE_S)
        found = oldest_operation()
        if found is not None and found[1] > _limit_s:
            what, lasted_s = found
            failed(
                f"StoreError: {what}: no answer for {lasted_s:.0f} s, expected one within "
                f"launch.step_timeout_s={_limit_s:.0f}; check that the store responds (a hanging "
                "mount does not), then run the same command again; or raise launch.step_timeout_s"
            )
            logging.shutdown()
            os._exit(1)
