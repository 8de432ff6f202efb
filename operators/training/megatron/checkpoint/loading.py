"""Loads checkpoints. Each rank reads the files that hold its part; a node shares one copy."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from operators.training.agree import await_ranks, folder_of_node, gathered
from operators.training.megatron.checkpoint.layouts import REMOVE, layout, refuse_other_layout
from operators.training.megatron.checkpoint.state import CRITIC, put_loaded, wanted_state
from operators.training.megatron.model import TrainedModel
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, DataFile, fetch_file, files_in, read_commit
from pipeline.run.restarts import restarts
from pipeline.store import Store

_SMALL = (".metadata", "metadata.json", "common.pt")
"""Files that Megatron writes in addition to the tensors; every rank reads them."""


def latest(store: Store) -> int | None:
    """Return the version of the newest checkpoint that a restart can use, or None."""
    return max(restarts(store), default=None)


def load(
    store: Store, version: int, model: TrainedModel, critic: TrainedModel | None = None
) -> None:
    """Restore the training state of a policy version, and of its critic. Every rank must call this.

    Args:
        store: The store of the run.
        version: The policy version.
        model: The model, which receives the state.
        critic: The critic, which receives the critic's state; None if there is no critic.

    Raises:
        InputError: This parallel layout cannot load the checkpoint.
        CorruptObjectError: An object is damaged or incomplete, or the critic's state is missing.
        ObjectMissingError: The commit or a file is missing.
    """
    body = read_checkpoint(store, version)
    refuse_other_layout(version, body["layout"], layout(model))

    _read(store, body, model, "")
    if critic is not None:
        _read(store, body, critic, CRITIC)


def _read(store: Store, body: dict[str, Any], model: TrainedModel, prefix: str) -> None:
    """Restore a model's state from the checkpoint files whose names begin with a prefix.

    Raises CorruptObjectError if the files are missing or belong to a different version.
    """
    version = body["version"]
    files = _files_of(store, body, prefix)

    def fetch(folder: Path, names: Iterable[str]) -> None:
        for name in names:
            if name not in files:
                raise CorruptObjectError(
                    f"{keys.checkpoint(version)} in {store.uri}: found no file {prefix}{name}, "
                    f"expected it among the files; {REMOVE}"
                )
            fetch_file(store, files[name], folder / name, REMOVE)

    with folder_of_node("checkpoint", lambda folder: fetch(folder, _SMALL)) as folder:
        # Older checkpoints lack this entry, but always contain optimizer state.
        stepped = dist_checkpointing.load_common_state_dict(str(folder)).get("stepped", True)
        wanted = wanted_state(model, stepped)
        sizes = {name: file.size for name, file in files.items()}
        strategy = _Fetching(lambda names: fetch(folder, own_share(names, sizes)))
        loaded = dist_checkpointing.load(wanted.state, str(folder), strategy)
    if loaded["version"] != version:
        raise CorruptObjectError(
            f"{keys.checkpoint(version)} in {store.uri}: found files of version "
            f"{loaded['version']}, expected version {version}; {REMOVE}"
        )
    put_loaded(model, wanted, loaded, stepped)


def _files_of(store: Store, body: dict[str, Any], prefix: str) -> dict[str, DataFile]:
    """Return the files of one model, keyed by Megatron's file names. Raises CorruptObjectError."""
    files = {file.key.rsplit("/", 1)[-1]: file for file in files_in(body)}
    own = {
        name.removeprefix(prefix): file
        for name, file in files.items()
        if name.startswith(CRITIC) == (prefix == CRITIC)
    }
    if not own:
        raise CorruptObjectError(
            f"{keys.checkpoint(body['version'])} in {store.uri}: found no file {prefix}*, expected "
            f"the state of the critic; {REMOVE}"
        )
    return own


def read_checkpoint(store: Store, version: int) -> dict[str, Any]:
    """Return the commit of a checkpoint.

    Raises ObjectMissingError, or CorruptObjectError if the commit is damaged or belongs to a
    different checkpoint.
    """
    body = read_commit(store, keys.checkpoint(version))
    if body.get("version") != version or not isinstance(body.get("layout"), dict):
        raise CorruptObjectError(
            f"{keys.checkpoint(version)} in {store.uri}: found a commit of version "
            f"{body.get('version')!r} with layout {body.get('layout')!r}, expected version "
            f"{version} and a layout; {REMOVE}"
        )
    return body


class _Fetching(TorchDistLoadShardedStrategy):
    """A variant of Megatron's reader that first fetches the files that hold the requested state."""

    def __init__(self, fetch: Callable[[set[str]], object]) -> None:
        super().__init__()
        self._fetch = fetch

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> dict[str, Any]:
        """Fetch files, wait for the node's other ranks, and read. Every rank must call this."""
        metadata = FileSystemReader(checkpoint_dir).read_metadata()
        self._fetch(files_with(sharded_state_dict, metadata))
        await_ranks()  # the ranks of a node fetch files for each other
        return super().load(sharded_state_dict, checkpoint_dir)


def files_with(state: dict[str, Any], metadata: Metadata) -> set[str]:
    """Return the names of the files that hold any part of the requested tensors and objects.

    Entries that the checkpoint lacks are skipped here. Megatron reports them when it loads.
    """
    stored = metadata.storage_data
    found: set[str] = set()
    for wanted in nested_values(state):
        if not isinstance(wanted, ShardedTensor):
            index = MetadataIndex(wanted.unique_key)
            if index in stored:
                found.add(stored[index].relative_path)
            continue
        entry = metadata.state_dict_metadata.get(wanted.key)
        if not isinstance(entry, TensorStorageMetadata):
            continue
        ahead = (1,) * wanted.prepend_axis_num
        box = (tuple(wanted.global_offset), (*ahead, *wanted.local_shape))
        found.update(
            stored[MetadataIndex(wanted.key, chunk.offsets)].relative_path
            for chunk in entry.chunks
            if _overlap(box, (tuple(chunk.offsets), tuple(chunk.sizes)))
        )
    return found


def _overlap(
    one: tuple[tuple[int, ...], tuple[int, ...]], other: tuple[tuple[int, ...], tuple[int, ...]]
) -> bool:
    return all(a < b + n and b < a + m for a, m, b, n in zip(*one, *other, strict=True))


def own_share(names: set[str], sizes: dict[str, int]) -> list[str]:
    """Return the files that this rank fetches, from among those that its node's ranks need.

    Every rank must call this. Files are assigned in descending order of size, each to the rank with
    the fewest bytes so far. `names` are the files that this rank needs; `sizes` contains the size
    of each file in bytes.
    """
    place = (os.environ["GROUP_RANK"], int(os.environ["LOCAL_RANK"]))
    of_node = {p: wanted for p, wanted in gathered((place, names)) if p[0] == place[0]}
    loads = dict.fromkeys(sorted(of_node), 0)
    own = []
    wanted = set[str]().union(*of_node.values())
    for name in sorted(wanted, key=lambda name: (-sizes.get(name, 0), name)):
        to = min(loads, key=lambda p: (loads[p], p))
        loads[to] += sizes.get(name, 0)
        if to == place:
            own.append(name)
    return own
