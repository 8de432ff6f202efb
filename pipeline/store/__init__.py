"""The object store: the only thing that flow, rollout and training share.

Every object is written once. `schemes` lists the kinds of store and opens them; `base` defines what
each must do. The names of a run's objects, commits and waiting are in pipeline.run.
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
from pipeline.store.schemes import is_remote, open_store, same_place, shown_uri

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
    "same_place",
    "shown_uri",
]
