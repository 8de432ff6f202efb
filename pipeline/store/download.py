"""Downloads of objects of any size to local files, in bounded memory."""

import contextlib
import hashlib
import os
import secrets
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from pipeline.store.base import NO_SPACE, Store, StoreError

PIECE = 8 << 20
"""Number of bytes per read; on S3, a read is one request."""
AHEAD = 8
"""Maximum number of pieces of one object that are in transit or in memory at the same time."""
_READERS = 8
"""Maximum number of parallel reads, across all downloads of this process.

Downloads have their own threads. If they used the store's threads, prefetching a policy would delay
the traces that workers write in the meantime."""


@contextmanager
def downloaded(store: Store, key: str, size: int, target: Path) -> Iterator[str]:
    """Download an object to a file, unless the block refuses the object by raising an error.

    The digest is computed from the pieces as they arrive. The pieces are written to a temporary
    file next to `target`. When the block ends, this file becomes `target`. After an error,
    including an error that the block raises, the temporary file is removed and `target` is
    unchanged.

    Args:
        store: The store to read from.
        key: The object.
        size: Size of the object in bytes.
        target: The local file to create or replace.

    Yields:
        The SHA-256 of the object, in hexadecimal digits.

    Raises:
        ObjectMissingError: The object does not exist.
        StoreError: The download failed; for example, the object is shorter or the disk is full.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    what = f"download {key} from {store.uri} to {target}"
    try:
        yield _fetch(store, key, size, temporary, what)
        with _writing(what):
            os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _fetch(store: Store, key: str, size: int, path: Path, what: str) -> str:
    digest = hashlib.sha256()
    with _writing(what), path.open("xb") as out:
        for piece in _pieces(store, key, size):
            digest.update(piece)
            out.write(piece)
    return digest.hexdigest()


def _pieces(store: Store, key: str, size: int) -> Iterator[bytes]:
    """Yield an object's bytes in order, reading AHEAD pieces ahead of the caller."""
    starts = iter(range(0, size, PIECE))
    ahead: deque[Future[bytes]] = deque()
    try:
        while True:
            while len(ahead) < AHEAD and (start := next(starts, None)) is not None:
                length = min(PIECE, size - start)
                ahead.append(_readers().submit(store.read_range, key, start, length))
            if not ahead:
                return
            yield ahead.popleft().result()
    finally:
        for read in ahead:  # not needed after an error
            read.cancel()


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READERS, "download")


os.register_at_fork(after_in_child=_readers.cache_clear)  # threads do not survive a fork


@contextmanager
def _writing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in NO_SPACE
        fix = "; free some space, or set TMPDIR to a larger disk" if full else ""
        raise StoreError(f"{what}: {error}{fix}") from error
