"""The object store: the only thing that flow, rollout and training share.

Every object is written once. Only commit objects (*.json) have names that others can compute;
`keys` owns those names, `commit` creates and reads them, `wait` waits for them.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.store.base import (
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    Store,
    StoreError,
    Upload,
)
from pipeline.store.file import FileStore

__all__ = [
    "ObjectExistsError",
    "ObjectInfo",
    "ObjectMissingError",
    "Store",
    "StoreError",
    "Upload",
    "open_store",
]


def open_store(uri: str) -> Store:
    """The store at a folder or file:// URI.

    Raises StoreError for any other scheme.
    """
    parts = urlsplit(uri)
    if parts.scheme == "":
        return FileStore(Path(uri))
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FileStore(Path(unquote(parts.path)))
    raise StoreError(
        f"store {uri!r}: scheme {parts.scheme!r} is not known; use a folder or file://"
    )
