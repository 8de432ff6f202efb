"""The tensors of a policy version, as listed by the shares in its commit.

In its share, each training rank lists the tensors that it wrote. For a difference, the share also
lists the tensors that did not change. Together, the shares list every tensor of the version once.
Example of a share:

    {"version": 7, "files": [...], "tensors": [
      ["lm_head.weight", "BF16", [32, 8], "5f0c...", "difference-00001-of-00002.safetensors"],
      ["model.norm.weight", "BF16", [8], "1b9e...", null], ...]}

The fourth item of a tensor's entry is the SHA-256 of its bytes in this version. The last item names
the file that holds these bytes, in full or coded; it is null if the tensor is the same as in the
previous version.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pipeline.policies.weights import SUFFIX, Tensor, tensors_digest
from pipeline.run import keys
from pipeline.run.commit import (
    MOST_BYTES,
    DataFile,
    file_list,
    files_in,
    parsing,
    read_data,
    write_id_of,
)
from pipeline.run.parse import Count, Digest, typed
from pipeline.store.base import Store

_Stored = list[tuple[str, str, tuple[Count, ...], Digest, str | None]]


class StoredTensor(NamedTuple):
    """A tensor of a policy version, and the file that holds its bytes."""

    tensor: Tensor
    file: str | None
    """Name of one of the version's files; None if unchanged since the previous version."""


def share_body(
    version: int, files: Iterable[DataFile], tensors: Iterable[StoredTensor]
) -> dict[str, Any]:
    """Return the JSON object of a rank's share of a policy version.

    Args:
        version: The policy version.
        files: Data files that this rank wrote.
        tensors: This rank's tensors, each with the name of its file, or None if unchanged.
    """
    listed = [[*tensor, file] for tensor, file in tensors]
    return {"version": version, "files": file_list(files), "tensors": listed}


def read_share(
    store: Store, share: DataFile, version: int, files: Mapping[str, DataFile], whole: bool
) -> tuple[list[str], list[StoredTensor]]:
    """Return the names of a share's files, and its tensors.

    Args:
        store: The store of the run.
        share: The share, as a data file of the version's commit.
        version: The policy version.
        files: The data files in the version's commit, keyed by file name.
        whole: Whether the version is whole, in which case each tensor must be in a file.

    Raises:
        CorruptObjectError: The share is damaged, or does not match the commit.
        ObjectMissingError: The share is missing.
        StoreError: The store cannot be read.
    """
    with parsing(store, share.key):
        if share.size > MOST_BYTES:
            raise ValueError(f"{share.size} bytes, expected at most {MOST_BYTES}")
        body = json.loads(read_data(store, share))
        if body.get("version") != version:
            raise ValueError(f"a share of version {body.get('version')!r}, expected {version}")
        if not share.key.startswith(keys.policy_file(version, write_id_of(body), "")):
            raise ValueError(
                f"found write id {write_id_of(body)!r} in the share, expected the one in its key"
            )
        own = [(file.key.rpartition("/")[2], file) for file in files_in(body)]
        for file_name, file in own:
            if files.get(file_name) != file:
                raise ValueError(
                    f"the share lists {file.key}, which is not in the commit of policy {version}"
                )
        found = tensors_in(body)
        for tensor, name in found:
            if name is None and whole:
                raise ValueError(
                    f"tensor {tensor.name} is not in a file, but policy {version} is whole"
                )
            if name is not None and not (name in files and name.endswith(SUFFIX)):
                raise ValueError(
                    f"tensor {tensor.name} is in {name!r}, which is not a weights file of policy "
                    f"{version}"
                )
    return [file_name for file_name, _ in own], found


def tensors_in(share: Mapping[str, Any]) -> list[StoredTensor]:
    """Return the tensors that a share lists. Raises ValueError for a malformed list."""
    return [
        StoredTensor(Tensor(*tensor), file) for *tensor, file in typed(share, "tensors", _Stored)
    ]


def tensors_by_name(found: Iterable[StoredTensor], weights_sha256: str) -> dict[str, StoredTensor]:
    """Return the tensors of all shares of a version, keyed by name.

    Raises ValueError if a tensor is listed twice, or if the weights digest of these tensors is not
    `weights_sha256`.
    """
    tensors = list(found)
    digest_of_all = tensors_digest(tensor for tensor, _ in tensors)
    if digest_of_all != weights_sha256:
        raise ValueError(
            f"the tensors in its shares have weights digest {digest_of_all[:16]}..., expected "
            f"{weights_sha256[:16]}... as in its commit"
        )
    return {stored.tensor.name: stored for stored in tensors}


def refuse_other_tensors(
    tensors: Mapping[str, StoredTensor], before: Mapping[str, StoredTensor]
) -> None:
    """Raise ValueError if the tensors of a difference do not match those of the previous version.

    Both versions must have tensors with the same names, dtypes and shapes. Unchanged tensors must
    have the same digests.
    """
    if odd := sorted(tensors.keys() ^ before.keys()):
        raise ValueError(f"tensor {odd[0]} is in only one of this version and the previous one")
    for name, (tensor, file) in tensors.items():
        earlier = before[name].tensor
        if (tensor.dtype, tensor.shape) != (earlier.dtype, earlier.shape):
            raise ValueError(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, expected {earlier.dtype} "
                f"{list(earlier.shape)} as in the previous version"
            )
        if file is None and tensor != earlier:
            raise ValueError(
                f"tensor {name} is listed as unchanged with digest {tensor.sha256[:16]}..., "
                f"expected {earlier.sha256[:16]}... as in the previous version"
            )
