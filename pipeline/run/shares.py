"""Shares: each rank commits its part of an object, and rank 0 then commits all parts together.

    rank r:  its data files ──► share r
    rank 0:  waits for every share ──► commit, which lists all files

The ranks wait for each other through the store instead of in a collective. A collective fails when
it reaches the time limit of its process group, but an upload may take as long as the store needs.
"""

import time
from collections.abc import Sequence
from typing import Any

from pipeline.run.commit import DataFile, commit, read_commit_file
from pipeline.run.wait import wait_for_all, wait_for_any
from pipeline.store.base import Store
from pipeline.threads import in_order


def write_share(store: Store, key: str, body: dict[str, Any], write_id: str) -> None:
    """Write a rank's share. The rank must already have written all of its data files.

    Args:
        store: The run.
        key: The share's key, which contains the write id.
        body: The share's content.
        write_id: The write id of the data files.
    """
    commit(store, key, body, write_id)


def await_shares(
    store: Store, keys: Sequence[str], timeout_s: float
) -> list[tuple[DataFile, dict[str, Any]]]:
    """Wait for the shares of all ranks.

    Args:
        store: The run.
        keys: The shares' keys, in rank order.
        timeout_s: Seconds to wait for all shares together.

    Returns:
        The data file entry and the body of each share, in rank order.

    Raises:
        WaitTimeoutError: A share is missing after `timeout_s`; the message names the first one.
        CorruptObjectError: A share is damaged.
        StoreError: The store failed.
    """
    deadline = time.monotonic() + timeout_s

    def wait(rank: int) -> None:
        left_s = max(0.0, deadline - time.monotonic())
        wait_for_any(store, [keys[rank]], left_s, f"training rank {rank}")

    wait_for_all(store, keys, wait)
    return list(in_order(lambda key: read_commit_file(store, key), keys))
