"""A function with which tests write the data files of a run."""

from pipeline.run.commit import DataFile, sha256
from pipeline.store import Store


def put_data(store: Store, key: str, data: bytes) -> DataFile:
    """Write a data file, and return its entry for a commit."""
    store.create(key, data)
    return DataFile(key, len(data), sha256(data))
