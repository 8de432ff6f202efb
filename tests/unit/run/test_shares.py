"""Shares of ranks: rank 0 waits for all shares.

If it waits too long, the error names the first missing share.
"""

import threading

import pytest

from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, DataFile, sha256
from pipeline.run.shares import await_shares, write_share
from pipeline.run.wait import WaitTimeoutError
from tests.memory_store import MemoryStore
from tests.patience import PATIENCE_S

KEYS = [keys.policy_share(3, "0a1b2c3d", rank) for rank in range(3)]


def test_shares_are_returned_in_rank_order_as_data_files():
    store = MemoryStore()

    def write() -> None:
        for rank in (2, 0, 1):
            write_share(store, KEYS[rank], {"rank": rank, "files": []}, "0a1b2c3d")

    writer = threading.Thread(target=write)
    writer.start()
    found = await_shares(store, KEYS, PATIENCE_S)
    writer.join()
    assert [body["rank"] for _, body in found] == [0, 1, 2]
    for key, (file, _) in zip(KEYS, found, strict=True):
        data = store.objects[key]
        assert file == DataFile(key, len(data), sha256(data))


def test_with_many_ranks_the_first_missing_share_is_named():
    store = MemoryStore()
    shares = [keys.policy_share(3, "0a1b2c3d", rank) for rank in range(100)]
    for rank in {*range(100)} - {41, 43, 99}:
        write_share(store, shares[rank], {"rank": rank}, "0a1b2c3d")
    with pytest.raises(WaitTimeoutError, match=rf"{shares[41]} in .*; training rank 41 should"):
        await_shares(store, shares, 0)
    for rank in (41, 43, 99):
        write_share(store, shares[rank], {"rank": rank}, "0a1b2c3d")
    assert [body["rank"] for _, body in await_shares(store, shares, 0)] == [*range(100)]


def test_a_changed_share_is_refused():
    store = MemoryStore()
    write_share(store, KEYS[0], {"rank": 0}, "0a1b2c3d")
    store.objects[KEYS[0]] = store.objects[KEYS[0]].replace(b'"rank": 0', b'"rank": 1')
    with pytest.raises(CorruptObjectError, match=KEYS[0]):
        await_shares(store, KEYS[:1], 0)
