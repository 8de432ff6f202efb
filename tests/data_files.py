"""Data files of a run, as a test writes them."""

from pipeline.run.commit import DataFile, sha256
from pipeline.store import Store


def put_data(store: Store, key: str, data: bytes) -> DataFile:
    """Write a data file and say what a commit must say of it."""
    store.create(key, data)
    return DataFile(key, len(data), sha256(data))
