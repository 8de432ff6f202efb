"""The owner of an attempt, and whether the owner is still alive.

    attempts/NNN.json   the owner: a process, or a flow run on Kubernetes and its newest process
    signs/NNN.KKKKKKKK   a sign of life: every SIGN_S seconds, the owner writes the next one and
                        removes the previous one

The object of an attempt is created only once, so an attempt has one owner. A process on the same
machine is looked up by its pid and its start. For any other process, the reader waits for a change
of the signs, and compares no clocks. A flow run is asked for at Prefect's server, if that server
knows it.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.run.parse import convert
from pipeline.scratch import is_running, parse_identity, this_process
from pipeline.store import ObjectExistsError, Store, StoreError

SIGN_S = 15.0
"""Seconds between two signs of life."""
SILENT_S = 60.0
"""Seconds without a sign of life after which an owner counts as dead."""
_LOOK_EVERY_S = 2.0
_END_S = 2.0

IsOver = Callable[[str], bool | None]
"""Returns whether the flow run with a given id is over; None if the server does not know it."""


@dataclass(frozen=True)
class Owner:
    """The owner of an attempt. Example: Owner('1f0c', None, 'gpu-7', '2f0c...-93', '2026-...')."""

    start: str
    """Identifies the call that began the attempt. One process may start a run several times."""
    flow_run: str | None
    """The id of the flow run on Kubernetes, which may continue the attempt in a different pod; None
    for a process."""
    host: str
    """The name of the host or pod."""
    process: str
    """The identity of the process (`pipeline.scratch`)."""
    since: str
    """When the attempt began, in UTC, by the owner's clock; for messages only."""

    def __str__(self) -> str:
        if self.flow_run is not None:
            return f"flow run {self.flow_run}" + (f" (pod {self.host})" if self.host else "")
        return f"process {parse_identity(self.process).pid} on {self.host}"

    def continues(self, other: "Owner") -> bool:
        """Return whether this owner may continue the attempt of `other`, its own flow run."""
        return self.flow_run is not None and self.flow_run == other.flow_run


def this_owner(flow_run: str | None = None) -> Owner:
    """Return a new owner: this process, on behalf of a flow run if it is given."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Owner(new_write_id(), flow_run, socket.gethostname(), str(this_process()), since)


def owner_of(attempt: Mapping[str, Any]) -> Owner | None:
    """Return the owner in the body of an attempt; None if it has none.

    Raises ValueError for an invalid owner.
    """
    value = attempt.get("owner")
    if value is None:
        return None
    owner = convert(value, Owner)
    parse_identity(owner.process)
    return owner


def owner_json(owner: Owner) -> dict[str, Any]:
    """Return the stored form of an owner."""
    return asdict(owner)


def runs_here(owner: Owner) -> bool | None:
    """Return whether the owner's process still runs; None if only signs of life can show it."""
    if owner.flow_run is not None or owner.process == str(this_process()):
        return None  # another pod may continue the flow run; another thread may be the owner
    return is_running(parse_identity(owner.process))


def is_alive(
    store: Store,
    number: int,
    owner: Owner,
    is_over: IsOver | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> bool:
    """Return whether the owner of a running attempt is alive; this may take SILENT_S seconds.

    Args:
        store: The run.
        number: The attempt's number.
        owner: The attempt's owner.
        is_over: Asks Prefect's server about a flow run; None if there is no such server here.
        show: Shows that this function waits.
    """
    if owner.flow_run is not None and is_over is not None:
        over = is_over(owner.flow_run)
        if over is not None:
            return not over
    here = runs_here(owner)
    if here is not None:
        return here
    show(f"waiting up to {SILENT_S:.0f} s for a sign of life from {owner}")
    first, deadline_s = _newest_sign(store, number), time.monotonic() + SILENT_S
    while time.monotonic() < deadline_s:
        time.sleep(_LOOK_EVERY_S)
        if store.size(keys.stop(number)) is not None:
            return False
        if _newest_sign(store, number) != first:
            return True
    return False


@contextlib.contextmanager
def signs_of_life(store: Store, number: int) -> Iterator[Callable[[], bool]]:
    """Give signs of life in a thread during the block.

    Yields a function that returns whether the attempt's stop object was seen. If this process did
    not write it, another start took the owner for dead and ended the attempt.
    """
    ending, stopped = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=_give_signs, args=(store, number, ending, stopped), name="signs", daemon=True
    )
    thread.start()
    try:
        yield stopped.is_set
    finally:
        ending.set()
        thread.join(_END_S)  # a store that does not answer must not delay the end


def remove_signs(store: Store, number: int) -> None:
    """Remove the signs of life that a dead owner left behind."""
    for info in list(store.list(keys.signs(number))):
        store.delete(info.key)


def _give_signs(
    store: Store, number: int, ending: threading.Event, stopped: threading.Event
) -> None:
    last: str | None = None
    old: list[str] = []  # signs to remove, also those that stayed while the store did not answer
    while not ending.is_set():
        # While the store does not answer, no other start can look for signs either.
        with contextlib.suppress(StoreError):
            last = last or _newest_sign(store, number)  # an earlier pod may have given signs
            count = 0 if last is None else int(last.rpartition(".")[2]) + 1
            old += [] if last is None else [last]
            last = keys.sign(number, count)
            with contextlib.suppress(ObjectExistsError):  # the response to a first try was lost
                store.create(last, b"")
            while old:
                store.delete(old[-1])
                old.pop()
            if store.size(keys.stop(number)) is not None:
                stopped.set()
        ending.wait(SIGN_S)
    with contextlib.suppress(StoreError):
        for sign in [*old, last] if last is not None else old:
            store.delete(sign)


def _newest_sign(store: Store, number: int) -> str | None:
    return max((info.key for info in store.list(keys.signs(number))), default=None)
