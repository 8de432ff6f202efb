"""The object store, through which the flow, rollout and training exchange all data.

Every object is written once. `schemes` lists the kinds of store and opens them. `base` defines the
interface of a backend. pipeline.run defines the names and commits of a run's objects, and waits for
objects.
"""

from pipeline.store.base import (
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    Store,
    StoreError,
    UnreadableError,
    Upload,
)
from pipeline.store.schemes import is_remote, open_store, place_text, same_place, shown_uri

__all__ = [
    "ObjectExistsError",
    "ObjectInfo",
    "ObjectMissingError",
    "RefusedError",
    "Store",
    "StoreError",
    "UnreadableError",
    "Upload",
    "is_remote",
    "open_store",
    "place_text",
    "same_place",
    "shown_uri",
]
