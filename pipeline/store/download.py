"""Downloads of objects of any size to local files, in bounded memory."""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.store.base import NO_SPACE, Store, StoreError
from pipeline.threads import in_order

PIECE = 8 << 20
"""Number of bytes per read; on S3, a read is one request."""
AHEAD = 8
"""Maximum number of pieces of one object that are in transit or in memory at the same time."""


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
        for piece in in_order(
            lambda start: store.read_range(key, start, min(PIECE, size - start)),
            range(0, size, PIECE),
            AHEAD,
        ):
            digest.update(piece)
            out.write(piece)
    return digest.hexdigest()


@contextmanager
def _writing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in NO_SPACE
        fix = "; free some space, or set TMPDIR to a larger disk" if full else ""
        raise StoreError(f"{what}: {error}{fix}") from error
