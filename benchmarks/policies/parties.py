"""Ranks that write a policy and workers that fetch it, each in a separate process.

A rank's tensors are already in its memory, so Megatron's gathering of tensors from other ranks is
not measured. For a difference, each rank already keeps its tensors of the previous version, as
training ranks do. Each party waits for the others before its measurement begins.
"""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks.policies import serial
from benchmarks.policies.weights import Piece, contents, of_rank, pieces, pools
from operators.training.publish.kept import KeptShare
from pipeline.policies.cache import PolicyCache
from pipeline.policies.publish import (
    difference_name,
    weights_name,
    write_difference,
    write_weights,
)
from pipeline.policies.tensors import StoredTensor, share_body
from pipeline.policies.versions import (
    Difference,
    PolicyVersion,
    commit_version,
    read_version,
)
from pipeline.policies.weights import Tensor, TensorPlace, tensors_digest
from pipeline.run import keys
from pipeline.run.commit import DataFile, read_commit_file
from pipeline.run.shares import await_shares, write_share
from pipeline.store import Store, open_store

RANKS = WORKERS = 4
_LOOK_S = 0.02
_PATIENCE_S = 600.0


@dataclass
class Spent:
    """Time, memory and bytes of a party. All processes share the clock of the times."""

    began: float = 0.0
    ended: float = 0.0
    cpu_s: float = 0.0
    memory: int = 0
    """Increase of anonymous memory from the start to its peak, in bytes, excluding mapped files."""
    sent: int = 0
    """Bytes sent or fetched."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds, keyed by part of the work."""

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Measure the time of a part."""
        began = time.monotonic()
        yield
        self.parts[part] = self.parts.get(part, 0.0) + time.monotonic() - began


@contextmanager
def measured(start: Barrier) -> Iterator[Spent]:
    """Wait for all parties, then measure a block."""
    spent, over, before = Spent(), threading.Event(), _own_memory()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            spent.memory = max(spent.memory, _own_memory() - before)

    start.wait(_PATIENCE_S)  # with a limit, because a party may have failed
    watcher = threading.Thread(target=watch)
    watcher.start()
    spent.began, cpu_s = time.monotonic(), time.process_time()
    try:
        yield spent
    finally:
        spent.ended, spent.cpu_s = time.monotonic(), time.process_time() - cpu_s
        over.set()
        watcher.join()


def _own_memory() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def serial_rank(uri: str, size: int, version: int, start: Barrier) -> Spent:
    """Write a policy from one rank, as in the former design.

    Args:
        uri: URI of the store.
        size: Approximate size of the policy in bytes.
        version: Version of the policy.
        start: Barrier of all parties.

    Returns:
        The rank's time, memory and bytes.
    """
    store, tensors = _ready(uri), pieces(size)
    with tempfile.TemporaryDirectory() as folder, measured(start) as spent:
        with spent.of("files written"):
            serial.export(Path(folder), tensors, version)
        with spent.of("digests, upload"):
            spent.sent = serial.publish(store, version, Path(folder))
    return spent


def serial_worker(uri: str, version: int, folder: str, start: Barrier) -> Spent:
    """Fetch a policy as a worker did in the former design.

    Args:
        uri: URI of the store.
        version: Version of the policy.
        folder: Folder for the files of all workers.
        start: Barrier of all parties.

    Returns:
        The worker's time, memory and bytes.
    """
    store = _ready(uri)
    with measured(start) as spent:
        spent.sent = serial.fetch(store, version, Path(folder) / str(os.getpid()))
    return spent


def rank(uri: str, size: int, version: int, number: int, whole: bool, start: Barrier) -> Spent:
    """Write one rank's share of a policy, whole or as the difference from version 0.

    Args:
        uri: URI of the store.
        size: Approximate size of the policy in bytes.
        version: Version of the policy.
        number: Index of the rank; rank 0 also commits the policy.
        whole: Whether to write a whole version.
        start: Barrier of all parties.

    Returns:
        The rank's time, memory and bytes.
    """
    store, write_id = _ready(uri), f"{version:08x}"
    key = keys.policy_share(version, write_id, number)
    mine = of_rank(size, number, RANKS)
    with tempfile.TemporaryDirectory(prefix="retrace-bench-") as folder:
        kept = None if whole else _kept(Path(folder), mine)
        with measured(start) as spent:
            with spent.of("digests, upload" if whole else "digests, coding, upload"):
                if kept is None:
                    file, tensors = _write_whole(store, mine, version, number, write_id)
                else:
                    file, tensors = _write_difference(store, kept, mine, version, number, write_id)
                write_share(store, key, share_body(version, [file], tensors), write_id)
            spent.sent = file.size
            if number == 0:
                with spent.of("waiting for shares, commit"):
                    _commit(store, version, write_id, whole)
    return spent


def worker(uri: str, version: int, folder: str, start: Barrier) -> Spent:
    """Obtain a version like a worker that shares its machine's copy with other workers.

    Args:
        uri: URI of the store.
        version: Version of the policy. Version 0 is fetched whole. For any other version, the
            machine's copy holds the previous version and is patched.
        folder: Folder for the machine's copies. Workers with the same folder are on the same
            machine.
        start: Barrier of all parties.

    Returns:
        The worker's time, memory and bytes. On each machine, one worker fetches the bytes.
    """
    store = _ready(uri)
    with closing(PolicyCache(store, Path(folder))) as copy:
        if version:
            _obtain(copy, version - 1)
        with measured(start) as spent:
            weights, fetch_s = _obtain(copy, version)
        policy = read_version(store, version)
        assert weights == policy.weights_sha256
        spent.sent = policy.size if fetch_s else 0
        start.wait(_PATIENCE_S)  # the last worker to leave removes the copy
    return spent


def _obtain(copy: PolicyCache, version: int) -> tuple[str, float]:
    """Return the weights digest of a version in the copy, and the seconds spent fetching it."""
    with copy.held(version) as held:
        weights = held.weights
    return weights, copy.loaded(version)


def _ready(uri: str) -> Store:
    """Return the connected store, and create the pools of weights."""
    store = open_store(uri)
    store.size("nothing")
    pools()
    return store


def _places(mine: list[Piece]) -> list[TensorPlace]:
    """Return the places of a rank's tensors in its weights file."""
    places, at = [], 0
    for piece in mine:
        places.append(TensorPlace(piece.name, "BF16", (piece.size // 2,), at, at + piece.size))
        at += piece.size
    return places


def _kept(folder: Path, mine: list[Piece]) -> KeptShare:
    """Keep a rank's tensors of version 0 in a folder."""
    kept = KeptShare(folder, [_places(mine)])
    kept.update(contents(mine, 0), compare=False)
    return kept


def _write_whole(
    store: Store, mine: list[Piece], version: int, number: int, write_id: str
) -> tuple[DataFile, list[StoredTensor]]:
    key = keys.policy_file(version, write_id, weights_name(number, RANKS))
    written = write_weights(store, key, _places(mine), contents(mine, version % 2))
    return written.file, list(written.tensors)


def _write_difference(
    store: Store, kept: KeptShare, mine: list[Piece], version: int, number: int, write_id: str
) -> tuple[DataFile, list[StoredTensor]]:
    name = difference_name(number, RANKS)
    changes = kept.update(contents(mine, version % 2), compare=True)
    assert changes.counts.tensors == len(mine)
    file = write_difference(store, keys.policy_file(version, write_id, name), changes.writer)
    return file, [StoredTensor(tensor, name) for tensor in changes.tensors]


def _commit(store: Store, version: int, write_id: str, whole: bool) -> None:
    shares = [keys.policy_share(version, write_id, number) for number in range(RANKS)]
    found = await_shares(store, shares, _PATIENCE_S)
    files = [DataFile(of["key"], of["size"], of["sha256"]) for _, b in found for of in b["files"]]
    tensors = [Tensor(n, d, tuple(s), h) for _, b in found for n, d, s, h, _ in b["tensors"]]
    difference = None
    if not whole:
        difference = Difference(version - 1, str(read_version(store, version - 1).weights_sha256))
    policy = PolicyVersion(
        version,
        tensors_digest(tensors),
        tuple(files),
        tuple(read_commit_file(store, key)[0] for key in shares),
        difference,
    )
    assert commit_version(store, policy, write_id).ours
