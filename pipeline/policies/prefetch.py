"""Fetching the next policy in a thread of a rollout worker while the engine generates.

    fetch(v+1) ──► v+1 is in the store? ──► other engines have loaded v? ──► the copy becomes v+1

If this thread fails, it only logs a warning. The worker then fetches the version when the engine
needs it. If the cause of the failure persists, that fetch raises the error.
"""

import logging
import threading

from pipeline.policies.cache import PolicyCache
from pipeline.run import keys
from pipeline.store.base import Store, StoreError

log = logging.getLogger(__name__)

_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0
_END_S = 5.0


class Prefetch:
    """A thread that fetches, into the machine's copy, the version that the engine needs next.

    The caller must `close` it.
    """

    def __init__(self, store: Store, cache: PolicyCache) -> None:
        self._store = store
        self._cache = cache
        self._wanted: int | None = None
        self._news = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="policy ahead", daemon=True)
        self._thread.start()

    def fetch(self, version: int) -> None:
        """Fetch a version as soon as the store contains it and no engine needs the previous one.

        A version older than the newest one requested so far is ignored, because after a validation
        with an older version, the next step still needs the newest version.
        """
        self._wanted = version if self._wanted is None else max(self._wanted, version)
        self._news.set()

    def close(self) -> None:
        """End the thread. The engine also leaves the copy, so a fetch in progress fails soon."""
        self._ended = True
        self._cache.leave()
        self._news.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        pause_s: float | None = None
        while True:
            if self._news.wait(pause_s):
                self._news.clear()
                pause_s = _PAUSE_S
            if self._ended:
                return
            version = self._wanted
            if version is None or self._tried(version):
                pause_s = None
            else:
                pause_s = min(1.2 * (pause_s or _PAUSE_S), _LONGEST_PAUSE_S)

    def _tried(self, version: int) -> bool:
        """Return whether this thread has nothing left to do for a version."""
        try:
            if self._store.size(keys.policy(version)) is None:
                return False
            return self._cache.fetch(version)
        except StoreError as error:
            if self._ended:
                return True
            log.warning(
                "policy %d could not be fetched ahead; it will be fetched when it is needed: %s",
                version,
                error,
            )
            return True
