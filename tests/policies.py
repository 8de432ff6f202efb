"""Policy versions, whole or as differences, as training ranks write them: one share per rank."""

import io
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from pipeline.policies.coding import encode
from pipeline.policies.difference import DifferenceWriter
from pipeline.policies.tensors import StoredTensor, share_body
from pipeline.policies.versions import Difference, PolicyVersion, commit_version, read_version
from pipeline.policies.weights import Tensor, tensors_digest
from pipeline.run import keys
from pipeline.run.commit import new_write_id, read_commit_file, sha256
from pipeline.run.shares import write_share
from pipeline.store import Store
from tests.data_files import put_data
from tests.weights import DTYPES, safetensors

Weights = Mapping[str, np.ndarray]
RANKS = 2


def some_policy(seed: int = 0) -> dict[str, np.ndarray]:
    """Return 16-bit weights in four tensors."""
    rng = np.random.default_rng(seed)
    shapes = {"embed.weight": (9, 4), "gate.weight": (4, 3), "norm.weight": (4,), "head": (9, 4)}
    return {name: rng.standard_normal(shape).astype("f2") for name, shape in shapes.items()}


def trained(weights: Weights, seed: int) -> dict[str, np.ndarray]:
    """Return the weights after a step that changed values in every tensor except `norm.weight`."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, array in weights.items():
        bits = array.view("u2").copy()
        if name != "norm.weight":
            bits.ravel()[rng.integers(bits.size, size=3)] += 1
        found[name] = bits.view("f2")
    return found


def write_policy(
    store: Store,
    version: int,
    weights: Weights,
    before: Weights | None = None,
    others: Mapping[str, bytes] = MappingProxyType({"config.json": b"{}"}),
    ranks: int = RANKS,
) -> PolicyVersion:
    """Commit a policy version, whole or as a difference.

    Args:
        store: The run's store.
        version: The policy version.
        weights: The tensors of the version, keyed by name.
        before: The tensors of the previous version, for a difference; None for a whole version.
        others: The other files of a whole version, keyed by name.
        ranks: The number of ranks. Each rank writes one file and its share.

    Returns:
        The committed policy version.
    """
    made = new_write_id()
    names = sorted(weights)
    tensors, files, shares = [], [], []
    for rank in range(ranks):
        mine = {name: weights[name] for name in names[rank::ranks]}
        if before is None:
            data, held = safetensors(mine), set(mine)
        else:
            data, held = _difference(mine, before)
        kind = "model" if before is None else "difference"
        name = f"{kind}-{rank + 1:05d}-of-{ranks:05d}.safetensors"
        its = [put_data(store, keys.policy_file(version, made, name), data)] if held else []
        if before is None and rank == 0:
            for other, content in others.items():
                its.append(put_data(store, keys.policy_file(version, made, other), content))
        listed = [
            StoredTensor(_tensor(of, array), name if of in held else None)
            for of, array in mine.items()
        ]
        share = keys.policy_share(version, made, rank)
        write_share(store, share, share_body(version, its, listed), made)
        shares.append(read_commit_file(store, share)[0])
        files += its
        tensors += listed
    digest = tensors_digest(stored.tensor for stored in tensors)
    difference = None
    if before is not None:
        base = read_version(store, version - 1).weights_sha256
        assert base is not None
        difference = Difference(version - 1, base)
    policy = PolicyVersion(version, digest, tuple(files), tuple(shares), difference)
    assert commit_version(store, policy, made).ours
    return policy


def write_chain(store: Store, first: int, count: int, seed: int = 0) -> list[Weights]:
    """Commit a whole version and `count - 1` differences.

    Args:
        store: The run's store.
        first: The number of the whole version, which the differences follow.
        count: The total number of versions.
        seed: The seed of the weights.

    Returns:
        The weights of each version.
    """
    found: list[Weights] = [some_policy(seed)]
    write_policy(store, first, found[0])
    for number in range(1, count):
        found.append(trained(found[-1], seed + number))
        write_policy(store, first + number, found[-1], found[-2])
    return found


def _difference(mine: Weights, before: Weights) -> tuple[bytes, set[str]]:
    writer, held = DifferenceWriter(io.BytesIO()), set()
    for name, array in mine.items():
        coded = encode(before[name], array, array.itemsize)
        if coded is not None:
            writer.add(name, coded)
            held.add(name)
    return b"".join(writer.pieces()), held


def _tensor(name: str, array: np.ndarray) -> Tensor:
    return Tensor(name, DTYPES[array.dtype.name], array.shape, sha256(array.tobytes()))
