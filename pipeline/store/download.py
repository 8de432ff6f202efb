"""Downloads of objects to local files, in bounded memory however large they are."""

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.store.base import Store, StoreError

PIECE = 64 << 20
"""Bytes in memory at a time. A backend fetches the parts of a piece in parallel; with smaller
pieces, fewer requests would run at a time and leave the network idle."""


@contextmanager
def downloaded(store: Store, key: str, size: int, target: Path) -> Iterator[str]:
    """Fetch an object of `size` bytes; the block receives its SHA-256 and may refuse it.

    The digest is computed from the pieces as they arrive and are written to a temporary file beside
    `target`. That file becomes `target` when the block ends; after an error, the block's own
    included, it is removed and `target` is unchanged.
    Raises ObjectMissingError; StoreError, also for a shorter object or a full disk.
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
        for offset in range(0, size, PIECE):
            piece = store.read_range(key, offset, min(PIECE, size - offset))
            digest.update(piece)
            out.write(piece)
    return digest.hexdigest()


@contextmanager
def _writing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "; free some space, or set TMPDIR to a larger disk" if full else ""
        raise StoreError(f"{what}: {error}{fix}") from error
