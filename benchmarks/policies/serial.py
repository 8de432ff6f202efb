"""The former transfer of policies in its simplest form, as the baseline.

Rank 0 has the tensors of all ranks. It writes a folder of safetensors files, reads it again to
compute two digests, and uploads one file after the other. A worker downloads one file after the
other.
"""

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from benchmarks.policies.weights import Piece
from pipeline.policies.versions import PolicyVersion, commit_version, read_version
from pipeline.policies.weights import read_weights, weights_digest
from pipeline.run import keys
from pipeline.run.commit import DataFile, new_write_id
from pipeline.store import Store

FILES = 4
PIECE = 64 << 20
"""Number of bytes that a worker fetches at a time."""


def export(folder: Path, tensors: list[Piece], version: int) -> None:
    """Write the files of a policy.

    Args:
        folder: Folder for the files.
        tensors: All tensors of the policy.
        version: Version of the policy.
    """
    for number in range(FILES):
        mine = {piece.name: _array(piece, version) for piece in tensors[number::FILES]}
        save_file(mine, folder / f"model-{number + 1:05d}-of-{FILES:05d}.safetensors")


def publish(store: Store, version: int, folder: Path) -> int:
    """Digest and upload one file after the other, then commit.

    Args:
        store: The run's store.
        version: Version of the policy.
        folder: Folder with the policy's files.

    Returns:
        The policy's bytes.
    """
    write_id, files, weights = new_write_id(), [], []
    for path in sorted(folder.iterdir()):
        weights.append(read_weights(path))
        key = keys.policy_file(version, write_id, path.name)
        store.upload_file(key, path)
        files.append(DataFile(key, path.stat().st_size, weights[-1].sha256))
    policy = PolicyVersion(version, weights_digest(weights), tuple(files))
    commit_version(store, policy, write_id)
    return policy.size


def fetch(store: Store, version: int, folder: Path) -> int:
    """Download and check one file after the other.

    Args:
        store: The run's store.
        version: Version of the policy.
        folder: Folder to create for the files.

    Returns:
        The policy's bytes.

    Raises:
        ValueError: A file differs from its digest in the commit.
    """
    policy = read_version(store, version)
    folder.mkdir(parents=True)
    for file in policy.files:
        digest = hashlib.sha256()
        with (folder / file.key.rpartition("/")[2]).open("xb") as out:
            for offset in range(0, file.size, PIECE):
                piece = store.read_range(file.key, offset, min(PIECE, file.size - offset))
                digest.update(piece)
                out.write(piece)
        if digest.hexdigest() != file.sha256:
            raise ValueError(f"{file.key}: SHA-256 differs from the one in its commit")
    return policy.size


def _array(piece: Piece, version: int) -> npt.NDArray[np.uint16]:
    return np.frombuffer(piece.content(version), np.uint16)
