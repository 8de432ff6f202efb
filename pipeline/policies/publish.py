"""Publishing a policy version: several ranks write safetensors files, and rank 0 commits them.

    rank r:  its weights files, tensor by tensor ──► share r
    rank 0:  config, tokenizer, index ──► share 0; waits for all shares ──► policy.json

The digests of the file and of each tensor are computed while the tensors' bytes are sent, so every
byte is in memory only once.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.policies.difference import DifferenceWriter
from pipeline.policies.tensors import StoredTensor, tensors_in
from pipeline.policies.versions import Difference, PolicyVersion, commit_version
from pipeline.policies.weights import (
    SUFFIX,
    Tensor,
    TensorPlace,
    tensors_digest,
    weights_header,
)
from pipeline.run.commit import Committed, DataFile, files_in, parsing
from pipeline.store.base import Store


@dataclass(frozen=True)
class WrittenFile:
    """A weights file in the store."""

    file: DataFile
    tensors: tuple[StoredTensor, ...]


def weights_name(number: int, count: int) -> str:
    """Return the name that transformers gives to weights file `number` (from 0) of `count`."""
    return f"model-{number + 1:05d}-of-{count:05d}{SUFFIX}" if count > 1 else f"model{SUFFIX}"


def write_weights(
    store: Store, key: str, tensors: Sequence[TensorPlace], contents: Iterator[memoryview]
) -> WrittenFile:
    """Write a weights file.

    Args:
        store: The store of the run.
        key: The key of the file.
        tensors: The tensors of the file, in the order of their bytes.
        contents: The bytes of each tensor, in the same order.

    Raises:
        ValueError: A tensor has more or fewer bytes than its place.
        StoreError: The file cannot be written.
    """
    of_file = hashlib.sha256()
    found: list[Tensor] = []
    with store.upload(key) as upload:
        header = weights_header(tensors)
        of_file.update(header)
        size = upload.write(header)
        for tensor in tensors:
            content = next(contents)
            if content.nbytes != tensor.end - tensor.begin:
                raise ValueError(
                    f"tensor {tensor.name} has {content.nbytes} bytes, expected "
                    f"{tensor.end - tensor.begin}"
                )
            of_file.update(content)
            digest = hashlib.sha256(content).hexdigest()
            found.append(Tensor(tensor.name, tensor.dtype, tensor.shape, digest))
            size += upload.write(content)
        upload.finish()
    name = key.rpartition("/")[2]
    tensors_of = tuple(StoredTensor(tensor, name) for tensor in found)
    return WrittenFile(DataFile(key, size, of_file.hexdigest()), tensors_of)


def write_difference(store: Store, key: str, writer: DifferenceWriter) -> DataFile:
    """Write a difference file.

    Args:
        store: The store of the run.
        key: The key of the file.
        writer: The complete difference.

    Raises:
        StoreError: The file cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    with store.upload(key) as upload:
        for piece in writer.pieces():
            digest.update(piece)
            size += upload.write(piece)
        upload.finish()
    return DataFile(key, size, digest.hexdigest())


def difference_name(number: int, count: int) -> str:
    """Return the name of difference file `number` (from 0) of `count`."""
    return f"difference-{number + 1:05d}-of-{count:05d}{SUFFIX}"


def index_of(files: Mapping[str, Iterable[tuple[str, int]]]) -> bytes:
    """Return a folder's index. `files` maps a file's name to its tensors' names and byte counts."""
    weight_map = {name: file for file, tensors in files.items() for name, _ in tensors}
    size = sum(size for tensors in files.values() for _, size in tensors)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def commit_shares(
    store: Store,
    version: int,
    shares: Sequence[tuple[DataFile, dict[str, Any]]],
    write_id: str,
    difference: Difference | None,
) -> tuple[Committed, PolicyVersion]:
    """Commit a policy version that the training ranks have written.

    Args:
        store: The store of the run.
        version: The policy version.
        shares: The data file and the JSON object of each rank's share.
        write_id: The write id in the names of the version's files.
        difference: The base of the difference; None if the version is whole.

    Returns:
        The commit, and the version that this call tried to commit. If another writer committed
        first, `Committed.ours` is False and `Committed.body` is that writer's commit.

    Raises:
        CorruptObjectError: A share is malformed.
        ValueError: Two ranks wrote the same tensor.
        StoreError: The commit cannot be written.
    """
    tensors: list[Tensor] = []
    for share, body in shares:
        with parsing(store, share.key):
            tensors += [stored.tensor for stored in tensors_in(body)]
    files = tuple(file for _, body in shares for file in files_in(body))
    of_ranks = tuple(share for share, _ in shares)
    policy = PolicyVersion(version, tensors_digest(tensors), files, of_ranks, difference)
    return commit_version(store, policy, write_id), policy
