"""The kinds of store, by the scheme of their URIs: one table, and what follows from it.

All differences between the kinds are columns of SCHEMES. Nothing outside pipeline.store names a
remote scheme; docs/store.md explains how to add one.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from pipeline.store.base import Store, StoreError
from pipeline.store.file import FileStore

DEFAULT_STORE = "outputs/store"
"""Where runs lie if nothing else is said: a folder below the working directory."""

EXAMPLE_STORE = "s3://team/runs"
"""A store that every machine reaches, for examples in messages and help."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_FILE_URI = re.compile(r"file:(?://(?P<host>[^/?#]*))?(?P<path>[^?#]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Scheme:
    """One kind of store. Example: Scheme('s3', 's3://BUCKET/PREFIX', 'as boto3 ...', ...)."""

    name: str
    """The part of a URI before the colon."""
    shape: str
    """The form of such a store's URI, for messages and docs."""
    credentials: str
    """How credentials are found, for docs; empty: none are needed."""
    remote: bool
    """Whether every machine reaches the store under its URI, as pods must."""
    open: Callable[[str], Store]
    """Opens the store at a URI without connecting to it. Raises StoreError for a wrong URI."""
    make_container: Callable[[str, float], bool]
    """See `make_container`."""
    remove_empty_folders: Callable[[str], None] = lambda uri: None
    """See `remove_empty_folders`."""
    free_bytes: Callable[[str], int | None] = lambda uri: None
    """See `free_bytes`."""


def _folder(uri: str) -> Path:
    """The folder of a path or a file:// URI."""
    match = _FILE_URI.match(uri)
    return Path(unquote(match["path"])) if match else Path(uri)


def _open_folder(uri: str) -> Store:
    match = _FILE_URI.match(uri)
    if match and match["host"] not in (None, "", "localhost"):
        raise StoreError(
            f"store {shown_uri(uri)!r}: found a host, expected none, as a file:// URI names a "
            "folder of this machine; write file:///FOLDER"
        )
    return FileStore(_folder(uri))


def _remove_empty_folders(uri: str) -> None:
    for folder, _, _ in os.walk(_folder(uri), topdown=False):
        with contextlib.suppress(OSError):  # something lies in it
            os.rmdir(folder)


def _free_on_disk(uri: str) -> int:
    folder = _folder(uri).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


# Backends with their own clients are imported late: importing boto3 takes a third of a second.


def _open_s3(uri: str) -> Store:
    from pipeline.store.s3 import S3Store

    return S3Store(uri)


def _make_bucket(uri: str, patience_s: float) -> bool:
    from pipeline.store.s3 import make_bucket

    return make_bucket(uri, patience_s)


_FOLDER = Scheme(
    "file",
    "file:// URI",
    "",
    False,
    _open_folder,
    lambda uri, patience_s: False,
    _remove_empty_folders,
    _free_on_disk,
)
_BOTO3 = "as boto3 finds them: environment, profile, web identity"
SCHEMES = (
    _FOLDER,
    Scheme("s3", "s3://BUCKET/PREFIX", _BOTO3, True, _open_s3, _make_bucket),
)


def one_of(words: list[str]) -> str:
    """Join words for a sentence: a, b or c."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


STORE_SHAPES = one_of([scheme.shape for scheme in SCHEMES])
"""The forms of URI that `open_store` accepts (beside a folder's path), for messages and docs."""
REMOTE_SHAPES = one_of([scheme.shape for scheme in SCHEMES if scheme.remote])
"""The forms of URI that every machine reaches."""
REMOTE_URI = one_of([f"{scheme.name}://" for scheme in SCHEMES if scheme.remote]) + " URI"
"""The same for a single object, whose URI has another form."""
CREDENTIALS = " ".join(
    f"Credentials for {scheme.name}:// are found {scheme.credentials}."
    for scheme in SCHEMES
    if scheme.credentials
)
"""How the credentials of each kind of store are found."""


def open_store(uri: str) -> Store:
    """Open the store at a folder, or at a URI of one of SCHEMES, without connecting to it.

    Endpoint, region and credentials come from the environment, see `settings`. Raises StoreError
    for any other scheme or a wrong URI.
    """
    return _known_scheme(uri).open(uri)


def make_container(uri: str, patience_s: float) -> bool:
    """Make the container of a store's objects (a bucket) if it is missing; return whether it was.

    Waits up to `patience_s` seconds for a server that does not answer. Folders are not made: the
    first object makes them. Raises StoreError.
    """
    return _known_scheme(uri).make_container(uri, patience_s)


def remove_empty_folders(uri: str) -> None:
    """Remove the folders in which no object is left, where a store has folders."""
    _known_scheme(uri).remove_empty_folders(uri)


def free_bytes(uri: str) -> int | None:
    """How many bytes the disk of a store still takes; None: its kind has no such limit.

    A folder that the first object would make need not be there. Raises StoreError.
    """
    return _known_scheme(uri).free_bytes(uri)


def is_remote(place: str) -> bool:
    """Whether a place is a URI that every machine reaches, not a path on this machine."""
    scheme = _find(place)
    return scheme is not None and scheme.remote


def place_in(store: Store, key: str) -> str:
    """How a setting names an object in a store, or a folder of objects: by its path or its URI."""
    uri = f"{store.uri}/{key}"
    return str(_folder(uri)) if _find(uri) is _FOLDER else uri


def same_place(one: str, other: str) -> bool:
    """Whether two paths or URIs name the same store, judging by the names alone."""
    return _canonical(one) == _canonical(other)


def shown_uri(uri: str) -> str:
    """A URI that may be shown: without credentials that a user put into it."""
    return re.sub("//[^/@]*@", "//***@", uri)


def _canonical(uri: str) -> str:
    return os.path.abspath(_folder(uri)) if _find(uri) is _FOLDER else uri.rstrip("/")


def _known_scheme(uri: str) -> Scheme:
    scheme = _find(uri)
    if scheme is None:
        raise StoreError(
            f"store {shown_uri(uri)!r}: scheme {uri.partition(':')[0]!r} is not known; use a "
            f"folder, {STORE_SHAPES}"
        )
    return scheme


def _find(uri: str) -> Scheme | None:
    """The scheme of a place, `file` for a path; None if it is unknown."""
    match = _SCHEME.match(uri)
    name = match[1].lower() if match else _FOLDER.name
    return next((scheme for scheme in SCHEMES if scheme.name == name), None)
