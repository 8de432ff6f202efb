"""`verify` reads whole versions and differences, builds their tensors, and reports defects."""

import io
import json

import numpy as np
import pytest

from pipeline.policies.coding import encode
from pipeline.policies.difference import DifferenceWriter, read_difference
from pipeline.policies.versions import read_version, weights_files
from pipeline.run import keys
from pipeline.run.commit import CONTENT_SHA256, content_digest, sha256, to_json
from pipeline.upkeep.verify import verify
from tests.memory_store import MemoryStore
from tests.policies import some_policy, trained, write_chain, write_policy
from tests.stored_runs import whole_run


@pytest.fixture(name="run")
def run_of_two_chains(tmp_path) -> MemoryStore:
    """A store with policy 1 (older, without shares) and two chains: policies 5 to 7, and 8 to 9."""
    store = MemoryStore()
    whole_run(store, tmp_path)
    write_chain(store, 5, 3)
    write_chain(store, 8, 2, seed=50)
    return store


def problems(store: MemoryStore) -> dict[str, str]:
    found = verify(store).problems
    assert len({problem.key for problem in found}) == len(found)
    return {problem.key: problem.text for problem in found}


def test_correct_chains_have_no_problems(run):
    report = verify(run)
    assert not report.problems
    assert not report.notes
    assert report.policies == 6
    named = {info.key for info in run.list("policies/") if not info.key.endswith("policy.json")}
    assert named <= report.seen.keys()


def test_only_the_missing_or_damaged_object_is_named(run):
    """The weights of later versions are not checked, because they cannot be built."""
    for info in list(run.list("policies/")):
        whole = dict(run.objects)
        if info.key != keys.policy(7) and info.key != keys.policy(9) and info.key != keys.policy(1):
            run.delete(info.key)
            assert list(problems(run)) == [info.key]
            run.objects = dict(whole)
        data = run.objects[info.key]
        for at in {0, len(data) // 2, len(data) - 2}:
            run.objects[info.key] = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            assert list(problems(run)) == [info.key]
        run.objects = whole
    assert not problems(run)


def remade(store: MemoryStore, key: str, **changes: object) -> None:
    """Change a commit or a share, and update the digest that it contains."""
    body = {**json.loads(store.objects[key]), **changes}
    store.objects[key] = to_json({**body, CONTENT_SHA256: content_digest(body)})


def replaced(store: MemoryStore, version: int, key: str, data: bytes) -> None:
    """Replace a file or share, and recompute every digest that covers it."""
    store.objects[key] = data
    changed = {"key": key, "size": len(data), "sha256": sha256(data)}
    for holder in [
        *(file.key for file in read_version(store, version).tensors),
        keys.policy(version),
    ]:
        body = json.loads(store.objects[holder])
        for name in ("files", "tensors"):
            listed = [
                changed if isinstance(f, dict) and f["key"] == key else f
                for f in body.get(name, [])
            ]
            if listed != body.get(name, []):
                remade(store, holder, **{name: listed})
                if holder != keys.policy(version):
                    replaced(store, version, holder, store.objects[holder])


def test_a_difference_from_different_weights_is_named_with_its_tensor(run):
    """All digests match, except that of the patched tensor."""
    weights = some_policy(99)
    policy = read_version(run, 6)
    file = policy.files[0].key
    writer = DifferenceWriter(io.BytesIO())
    names = sorted(weights)[::2]
    for name in names:
        coded = encode(weights[name], trained(weights, 77)[name], 2)
        if coded is not None:
            writer.add(name, coded)
    replaced(run, 6, file, b"".join(writer.pieces()))
    found = problems(run)
    assert list(found) == [file]
    assert found[file].startswith(f"tensor {names[0]} after this patch has SHA-256 ")


@pytest.mark.parametrize("version", [6, 7])
def test_coded_bytes_of_the_wrong_length_are_named(run, version):
    file = read_version(run, version).files[0].key
    writer = DifferenceWriter(io.BytesIO())
    for name in sorted(some_policy())[::2]:
        if name != "norm.weight":
            writer.add(name, encode(np.zeros(5, "u2"), np.ones(5, "u2"), 2))
    replaced(run, version, file, b"".join(writer.pieces()))
    found = problems(run)
    assert list(found) == [file]
    assert "words of 2 bytes, expected one for a tensor of" in found[file]


def test_a_file_without_the_tensors_in_its_shares_is_named(run):
    first, second = (file.key for file in read_version(run, 5).files if "model" in file.key)
    swapped = run.objects[second]
    replaced(run, 5, second, run.objects[first])
    replaced(run, 5, first, swapped)
    assert list(problems(run)) == [keys.policy(5)]
    assert "is in policies/000005/" in problems(run)[keys.policy(5)]


def test_a_base_with_different_weights_is_named(run):
    """Policy 8, which has the same shapes, takes the place of policy 5. Everything else matches."""
    for info in list(run.list("policies/000005/")):
        run.delete(info.key)
    write_policy(run, 5, some_policy(7))
    found = problems(run)
    assert list(found) == [keys.policy(6)]
    assert "found a difference from weights" in found[keys.policy(6)]


def test_versions_that_cannot_be_built_are_noted(run):
    key = read_version(run, 6).files[0].key
    run.objects[key] = b"x" * len(run.objects[key])
    report = verify(run)
    assert [problem.key for problem in report.problems] == [key]
    assert [str(note) for note in report.notes] == [
        f"{keys.policy(7)}: its tensors are based on policy 6, whose tensors could not be built"
    ]


def test_policies_that_retention_removes_meanwhile_are_not_reported(run):
    """Retention removes versions from the end of a chain, and each commit before its files."""
    read, removed = run.read_range, {}

    def removing(key, offset, length):
        if "/000005/" in key and "/model" in key and not removed:  # while the tensors are built
            for version in (7, 6, 5):
                for info in list(run.list(f"policies/{version:06d}/"))[::-1]:
                    removed[info.key] = run.objects.pop(info.key)
            return removed[key][offset : offset + length]
        return read(key, offset, length)

    run.read_range = removing
    assert not problems(run)
    assert run.size(keys.policy(5)) is None


def test_reading_a_chain_needs_few_bytes_and_requests(tmp_path):
    """Verify reads each byte of the whole version once. It reads each byte of a difference twice:
    once for the digest and once for the tensors. One request reads all tensors of a difference.
    """
    store = MemoryStore()
    whole_run(store, tmp_path)
    write_chain(store, 5, 4)
    read, ranges = store.read_range, []
    store.read_range = lambda key, at, n: ranges.append((key, n)) or read(key, at, n)
    assert not verify(store).problems
    for version in range(5, 9):
        for file in weights_files(read_version(store, version).files):
            sizes = [n for key, n in ranges if key == file.key]
            header = int.from_bytes(store.objects[file.key][:8], "little")
            tensors = file.size - 8 - header
            expected = [file.size] if version == 5 else [file.size, 8, header, tensors]
            assert sizes == expected


def test_a_difference_with_its_tensors_in_a_different_order_is_correct(run):
    """Other writers may write such a difference. Its tensors are read one by one."""
    policy = read_version(run, 6)
    key = policy.files[0].key
    coded = read_difference(run.objects[key])
    assert len(coded) > 1
    writer = DifferenceWriter(io.BytesIO())
    for name in reversed(coded):
        writer.add(name, bytes(coded[name]))
    replaced(run, 6, key, b"".join(writer.pieces()))
    assert not problems(run)
