"""Several ranks write a policy version together."""

import hashlib
import json

from safetensors.numpy import load

from pipeline.policies.fetch import fetch_policy
from pipeline.policies.publish import commit_shares, index_of, weights_name, write_weights
from pipeline.policies.tensors import share_body
from pipeline.policies.weights import INDEX, TensorPlace, read_weights, weights_header
from pipeline.run import keys
from pipeline.run.commit import DataFile
from pipeline.run.shares import await_shares, write_share
from tests.memory_store import MemoryStore
from tests.weights import digest_of

CONTENTS = {"a": bytes(range(8)), "b": b"1234", "c": b""}
PLACES = [
    TensorPlace("a", "F32", (2,), 0, 8),
    TensorPlace("b", "U8", (2, 2), 8, 12),
    TensorPlace("c", "BF16", (0, 3), 12, 12),
]


def contents(places):
    return iter([memoryview(CONTENTS[place.name]) for place in places])


def without_bf16(store) -> bytes:
    """Return a file without the bf16 tensor, because numpy lacks that type."""
    key = keys.policy_file(2, "aaaaaaaa", "model.safetensors")
    write_weights(store, key, PLACES[:2], contents(PLACES[:2]))
    return bytes(store.read(key))


def test_safetensors_reads_a_file_and_its_digests_are_correct(tmp_path):
    store = MemoryStore()
    key = keys.policy_file(1, "aaaaaaaa", "model.safetensors")
    written = write_weights(store, key, PLACES, contents(PLACES))
    data = store.read(key)
    assert written.file == DataFile(key, len(data), hashlib.sha256(data).hexdigest())
    assert load(without_bf16(store))["b"].tolist() == [[49, 50], [51, 52]]
    (tmp_path / "model.safetensors").write_bytes(data)
    found = read_weights(tmp_path / "model.safetensors")
    assert found.tensors == tuple(stored.tensor for stored in written.tensors)
    assert {stored.file for stored in written.tensors} == {"model.safetensors"}
    assert len(weights_header(PLACES)) % 8 == 0


def test_file_names_are_those_of_transformers():
    assert weights_name(0, 1) == "model.safetensors"
    assert weights_name(1, 12) == "model-00002-of-00012.safetensors"
    index = json.loads(index_of({"x": [("b", 3)], "y": [("a", 4)]}))
    assert index == {"metadata": {"total_size": 7}, "weight_map": {"a": "y", "b": "x"}}


def test_ranks_commit_a_version_through_shares(tmp_path):
    """The ranks' files are fetched as one folder."""
    store = MemoryStore()
    for write_id in ("aaaaaaaa", "bbbbbbbb"):
        for rank, places in enumerate(([PLACES[0]], [PLACES[1]._replace(begin=0, end=4)])):
            key = keys.policy_file(1, write_id, weights_name(rank, 2))
            written = write_weights(store, key, places, contents(places))
            files = [written.file]
            if rank == 0:
                other = keys.policy_file(1, write_id, INDEX)
                store.create(other, b"{}")
                files.append(DataFile(other, 2, hashlib.sha256(b"{}").hexdigest()))
            body = share_body(1, files, written.tensors)
            write_share(store, keys.policy_share(1, write_id, rank), body, write_id)
        of_ranks = [keys.policy_share(1, write_id, rank) for rank in range(2)]
        shares = await_shares(store, of_ranks, 1.0)
        committed, policy = commit_shares(store, 1, shares, write_id, None)
        assert committed.ours == (write_id == "aaaaaaaa")
        assert committed.body["weights_sha256"] == policy.weights_sha256
    assert fetch_policy(store, 1, tmp_path) == policy.weights_sha256
    assert digest_of(tmp_path) == policy.weights_sha256
    assert (tmp_path / INDEX).read_bytes() == b"{}"
