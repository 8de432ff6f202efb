"""The checkpoints of a run: their sizes, parallel layouts and missing files.

Only the checkpoints' commits are read, not their training state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, files_in, read_commit
from pipeline.run.parse import typed
from pipeline.run.restarts import restarts
from pipeline.store import ObjectMissingError, Store


@dataclass(frozen=True)
class ListedCheckpoint:
    """A committed checkpoint."""

    version: int
    """The policy version. Training from this checkpoint continues at the step with this number."""
    size: int
    """The total size of the checkpoint's files in bytes."""
    layout: Mapping[str, object]
    """The layout of the run that saved the checkpoint: parallel sizes, keyed by name, and the
    entries `distributed_optimizer` and `dtype`."""
    restarts: bool
    """Whether a restart may begin with this checkpoint, which requires that the metrics of the
    checkpoint's step exist."""
    problem: str
    """The reason why the checkpoint cannot be loaded, as far as its commit shows; empty if no
    reason is known."""


def list_checkpoints(store: Store) -> Iterator[ListedCheckpoint]:
    """Yield the committed checkpoints, in ascending order of version. Raises StoreError."""
    sizes = {info.key: info.size for info in store.list(keys.checkpoints())}
    usable = set(restarts(store))
    for version in sorted(v for v in map(keys.number_of, sizes) if v is not None):
        key = keys.checkpoint(version)
        if key not in sizes:
            continue
        try:
            body = read_commit(store, key)
            files = files_in(body)
            layout = typed(body, "layout", dict[str, Any])
        except ObjectMissingError:  # removed since it was listed
            continue
        except (CorruptObjectError, ValueError) as error:
            yield ListedCheckpoint(version, 0, {}, False, str(error))
            continue
        missing = [file.key for file in files if sizes.get(file.key) != file.size]
        problem = f"{missing[0]} is missing or has a different size" if missing else ""
        size = sum(file.size for file in files)
        yield ListedCheckpoint(version, size, dict(layout), version in usable, problem)
