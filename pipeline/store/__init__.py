"""The object store: the only thing that flow, rollout and training share.

Every object is written once. Only commit objects (*.json) have names that others can compute;
`keys` owns those names, `commit` creates and reads them, `wait` waits for them.
"""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.store.base import (
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    Store,
    StoreError,
    Upload,
)
from pipeline.store.file import FileStore

__all__ = [
    "ObjectExistsError",
    "ObjectInfo",
    "ObjectMissingError",
    "RefusedError",
    "Store",
    "StoreError",
    "Upload",
    "open_store",
    "shown_uri",
]


def shown_uri(uri: str) -> str:
    """A URI as it may be shown: without a password that somebody has written into it."""
    return re.sub("//[^/@]*@", "//***@", uri)


def open_store(uri: str) -> Store:
    """The store at a folder, a file:// URI or an s3://bucket/prefix URI.

    What the URI does not say (endpoint, region, credentials) is in the environment, see settings.
    Nothing is connected to yet. Raises StoreError for any other scheme or a wrong URI.
    """
    parts = urlsplit(uri)
    if parts.scheme == "":
        return FileStore(Path(uri))
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "s3":
        # Imported here: boto3 takes a third of a second, and files need it not.
        from pipeline.store.s3 import S3Store

        return S3Store(uri)
    raise StoreError(
        f"store {shown_uri(uri)!r}: scheme {parts.scheme!r} is not known; use a folder, file:// or s3://"
    )
