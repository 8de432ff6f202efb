"""A policy version is fetched whole and right, or refused."""

import pytest

from pipeline.run import keys
from pipeline.run.amendments import Amendment, write_amendment
from pipeline.run.commit import CorruptObjectError, commit, file_list, files_in, read_commit
from pipeline.run.policy import (
    digests_of,
    fetch_policy,
    policy_digest,
    publish_policy,
    refer_policy,
    weights_of,
)
from pipeline.upkeep.verify import verify
from tests.data_files import put_data
from tests.memory_store import MemoryStore
from tests.stored_runs import whole_run
from tests.weights import some_weights


def test_a_damaged_policy_is_refused(tmp_path):
    """Its good files may be there; the damaged one is not."""
    store, source = MemoryStore(), tmp_path / "policy"
    source.mkdir()
    (source / "model.safetensors").write_bytes(some_weights())
    (file,) = publish_policy(store, 1, source).body["files"]
    store.objects[file["key"]] = some_weights(1)
    with pytest.raises(CorruptObjectError, match=r"model\.safetensors in memory://test: SHA-256"):
        fetch_policy(store, 1, tmp_path / "fetched")
    assert list((tmp_path / "fetched").iterdir()) == []


@pytest.mark.parametrize("other", [keys.checkpoint(1), keys.validation(0, 1), keys.run_json()])
def test_a_commit_of_something_else_is_no_policy(tmp_path, other):
    store = MemoryStore()
    whole_run(store, tmp_path)
    store.objects[keys.policy(1)] = store.objects[other]
    with pytest.raises(CorruptObjectError, match=r"policy\.json in .*expected that of policy 1"):
        fetch_policy(store, 1, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


def test_another_version_in_its_place_is_refused(tmp_path):
    store = MemoryStore()
    whole_run(store, tmp_path)
    store.objects[keys.policy(2)] = store.objects[keys.policy(1)]
    with pytest.raises(CorruptObjectError, match="found a commit of version 1"):
        fetch_policy(store, 2, tmp_path / "fetched")


def as_older_versions_wrote_it(store: MemoryStore, version: int) -> None:
    """With a digest of the files in place of the weights digest."""
    body = read_commit(store, keys.policy(version))
    files = files_in(body)
    old = {"version": version, "sha256": policy_digest(files), "files": file_list(files)}
    store.delete(keys.policy(version))
    commit(store, keys.policy(version), old, "aa")


def test_a_policy_of_an_older_version_is_read_and_its_weights_digest_taken(tmp_path):
    store = MemoryStore()
    whole_run(store, tmp_path)
    digest = weights_of(store, 1)
    as_older_versions_wrote_it(store, 1)
    assert weights_of(store, 1) == digest
    assert fetch_policy(store, 1, tmp_path / "fetched") == digest
    assert digests_of(tmp_path / "fetched").weights == digest
    assert not verify(store).problems
    forged = {**read_commit(store, keys.policy(1)), "sha256": "0" * 64}
    store.delete(keys.policy(1))
    commit(store, keys.policy(1), forged, "aa")
    assert [problem.key for problem in verify(store).problems] == [keys.policy(1)]


def test_the_weights_of_an_amended_policy_0_are_those_of_the_amendment(tmp_path):
    """Its commit still names the files, and the weights digest, of run.json."""
    store = MemoryStore()
    whole_run(store, tmp_path)
    first, second = (
        put_data(store, keys.input_file(str(n) * 64, "model.safetensors"), some_weights(n))
        for n in (7, 8)
    )
    refer_policy(store, 0, [first], "0" * 64)
    assert weights_of(store, 0) == "0" * 64
    change = {"inputs.model": {"model.safetensors": second}}
    write_amendment(store, Amendment(0, "mended", 1, change))
    (tmp_path / "model.safetensors").write_bytes(some_weights(8))
    digest = digests_of(tmp_path).weights
    assert weights_of(store, 0) == fetch_policy(store, 0, tmp_path / "fetched") == digest


def test_weights_that_are_no_safetensors_have_no_digest(tmp_path):
    """Older policies, of which only the files have digests, may be of any bytes."""
    store = MemoryStore()
    whole_run(store, tmp_path)
    key = keys.policy_file(2, "00000000", "model.safetensors")
    refer_policy(store, 2, [put_data(store, key, b"weights")], "0" * 64)
    [problem] = verify(store).problems
    assert (problem.key, problem.text) == (keys.policy(2), f"{key} is no whole safetensors file")
    as_older_versions_wrote_it(store, 2)
    assert not verify(store).problems
