"""The kinds of store, each identified by the scheme of its URIs.

All differences between the kinds are columns of SCHEMES. No code outside pipeline.store names a
remote scheme. docs/store.md explains how to add a scheme.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pipeline.store.base import Store, StoreError
from pipeline.store.file import FileStore

if TYPE_CHECKING:
    from pipeline.store.s3 import S3Store

DEFAULT_STORE = "outputs/store"
"""The default store: a folder below the working directory."""

EXAMPLE_STORE = "s3://team/runs"
"""An example, for messages and help texts, of a store that every machine can reach."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_HOME_URI = re.compile(r"file:(?://)?(?=~)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_FILE_URI = re.compile(r"file:(?://(?P<host>[^/?#]*))?(?P<path>[^?#]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Scheme:
    """One kind of store. Example: Scheme('s3', 's3://BUCKET/PREFIX', 'where boto3 ...', ...)."""

    name: str
    """The part of a URI before the colon."""
    shape: str
    """The form of the URIs of these stores, for messages and docs."""
    credentials: str
    """Where credentials are found, for docs; empty if no credentials are needed."""
    remote: bool
    """Whether every machine can reach the store at its URI, as a run with pods requires."""
    open: Callable[[str], Store]
    """Opens the store at a URI without connecting to it. Raises StoreError for an invalid URI."""
    make_container: Callable[[str, float], bool] = lambda uri, patience_s: False
    """See `make_container`."""
    greet: Callable[[str], None] = lambda uri: None
    """See `greet`."""


def _folder(uri: str) -> Path:
    """Return the folder that a path or a file:// URI names."""
    match = _FILE_URI.match(uri)
    return Path(unquote(match["path"])) if match else Path(place_text(uri))


def _open_folder(uri: str) -> Store:
    match = _FILE_URI.match(uri)
    if match and match["host"] not in (None, "", "localhost"):
        raise StoreError(
            f"store {shown_uri(uri)!r}: found a host, expected none, because a file:// URI names "
            "a folder on this machine; use the form file:///FOLDER"
        )
    return FileStore(Path(_possible(_folder(uri))))


def _s3(uri: str) -> "S3Store":
    # Imported only when it is needed, because importing boto3 takes a third of a second.
    from pipeline.store.s3 import S3Store

    return S3Store(uri)


_FOLDER = Scheme("file", "file:// URI", "", False, _open_folder)
SCHEMES = (
    _FOLDER,
    Scheme(
        "s3",
        "s3://BUCKET/PREFIX",
        "where boto3 looks for them: environment, profile, web identity",
        True,
        _s3,
        lambda uri, patience_s: _s3(uri).make_bucket(patience_s),
        lambda uri: _s3(uri).greet(),
    ),
)


def one_of(words: list[str]) -> str:
    """Join words as in a sentence: a, b or c."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


STORE_SHAPES = one_of([scheme.shape for scheme in SCHEMES])
"""The forms of URI that `open_store` accepts in addition to a path, for messages and docs."""
REMOTE_SHAPES = one_of([scheme.shape for scheme in SCHEMES if scheme.remote])
"""The forms of URI that every machine can reach."""
REMOTE_URI = one_of([f"{scheme.name}://" for scheme in SCHEMES if scheme.remote]) + " URI"
"""The kind of URI that names a single object, such as a file, in a place that every machine can
reach."""
CREDENTIALS = " ".join(
    f"Credentials for {scheme.name}:// are found {scheme.credentials}."
    for scheme in SCHEMES
    if scheme.credentials
)
"""Where the credentials of each kind of store are found."""


def open_store(uri: str | Path) -> Store:
    """Open the store at a folder, or at a URI of one of SCHEMES, without connecting to it.

    Endpoint, region and credentials come from the environment; see `settings`. Raises StoreError
    for an unknown scheme, and for values that are neither a path nor a valid URI.
    """
    text = _possible(uri)
    return _known_scheme(text).open(text)


def _possible(place: object) -> str:
    """Return a path or URI as text. Raises StoreError if `place_text` refuses it."""
    try:
        return place_text(place)
    except ValueError as error:
        raise StoreError(f"store: {error}; give a folder, {STORE_SHAPES}") from error


def place_text(place: object) -> str:
    """Return a path or URI as text, with `~` and `$VARIABLE` expanded as a shell does.

    Raises ValueError for other types, for an empty text, for text that no file name can contain,
    and for users and variables that do not exist.
    """
    if not isinstance(place, str | Path):
        raise ValueError(f"found a value of type {type(place).__name__}, expected a str or a Path")
    text = str(place)
    try:
        possible = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise ValueError(f"found {shown_uri(text)!a}, expected text without U+0000 and surrogates")
    if not text:
        raise ValueError("found an empty text, expected a path or URI")
    if home := _HOME_URI.match(text):
        text = unquote(text[home.end() :])
    expanded = os.path.expanduser(os.path.expandvars(text))
    if missing := _VARIABLE.search(expanded):
        raise ValueError(f"found {text!r}, but the variable {missing[1]} is not set")
    if text.startswith("~") and expanded.startswith("~"):
        raise ValueError(f"found {text!r}, but the user {text[1:].split('/')[0]!r} has no folder")
    return expanded


def make_container(uri: str, patience_s: float) -> bool:
    """Create the container of a store's objects (a bucket) if it is missing.

    Returns whether the container was missing. Waits up to `patience_s` seconds for a server that
    does not respond. Does not create folders, because writing the first object creates them. Raises
    StoreError.
    """
    return _known_scheme(uri).make_container(uri, patience_s)


def greet(uri: str) -> None:
    """Make the first contact with a store's server, within seconds.

    If the server does not answer, requests to it fail at once for a while, with the same error.
    Raises StoreError if the place is not valid or the client's settings are not.
    """
    _known_scheme(uri).greet(uri)


def remove_empty_folders(uri: str) -> None:
    """Remove the empty folders of a store, if its kind of store has folders."""
    if _known_scheme(uri) is not _FOLDER:
        return
    for folder, _, _ in os.walk(_folder(uri), topdown=False):
        with contextlib.suppress(OSError):  # the folder is not empty
            os.rmdir(folder)


def free_bytes(uri: str) -> int | None:
    """Return the number of free bytes on a store's disk; None if the capacity is not fixed.

    The store's folder may not exist yet. Raises StoreError.
    """
    if _known_scheme(uri) is not _FOLDER:
        return None
    folder = _folder(uri).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def is_remote(place: str) -> bool:
    """Return whether a place is a URI that every machine can reach, not a path on this machine."""
    scheme = _find(place)
    return scheme is not None and scheme.remote


def place_in(store: Store, key: str) -> str:
    """Return the path or URI that a setting uses to name an object or a folder of objects."""
    uri = f"{store.uri}/{key}"
    return str(_folder(uri)) if _find(uri) is _FOLDER else uri


def same_place(one: str, other: str) -> bool:
    """Return whether two paths or URIs name the same store. Only the texts are compared."""
    return _canonical(one) == _canonical(other)


def shown_uri(uri: str) -> str:
    """Return a URI without the credentials that a user put into it."""
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
    """Return the scheme of a place (`file` for a path); None if the scheme is unknown."""
    match = _SCHEME.match(uri)
    name = match[1].lower() if match else _FOLDER.name
    return next((scheme for scheme in SCHEMES if scheme.name == name), None)
