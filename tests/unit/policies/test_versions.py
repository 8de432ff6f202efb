"""A policy version is either fetched completely and correctly or refused."""

import pytest

from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import (
    digests_of,
    policy_digest,
    publish_policy,
    refer_policy,
    weights_of,
)
from pipeline.run import keys
from pipeline.run.amendments import Amendment, write_amendment
from pipeline.run.commit import CorruptObjectError, commit, file_list, files_in, read_commit
from pipeline.upkeep.verify import verify
from tests.data_files import put_data
from tests.memory_store import MemoryStore
from tests.stored_runs import whole_run
from tests.weights import some_weights


def test_a_damaged_policy_is_refused(tmp_path):
    """No file is left, not even an undamaged one, so the folder can be used again."""
    store, source = MemoryStore(), tmp_path / "policy"
    source.mkdir()
    (source / "config.json").write_bytes(b"{}")
    (source / "model.safetensors").write_bytes(some_weights())
    (_, file) = publish_policy(store, 1, source).body["files"]
    store.objects[file["key"]] = some_weights(1)
    with pytest.raises(CorruptObjectError, match=r"model\.safetensors in memory://test: SHA-256"):
        fetch_policy(store, 1, tmp_path / "fetched")
    assert list((tmp_path / "fetched").iterdir()) == []


@pytest.mark.parametrize("other", [keys.checkpoint(1), keys.validation(0, 1), keys.run_json()])
def test_a_commit_of_another_kind_is_refused(tmp_path, other):
    store = MemoryStore()
    whole_run(store, tmp_path)
    store.objects[keys.policy(1)] = store.objects[other]
    with pytest.raises(CorruptObjectError, match=r"policy\.json in .*expected that of policy 1"):
        fetch_policy(store, 1, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


def test_the_commit_of_a_different_version_is_refused(tmp_path):
    store = MemoryStore()
    whole_run(store, tmp_path)
    store.objects[keys.policy(2)] = store.objects[keys.policy(1)]
    with pytest.raises(CorruptObjectError, match="found a commit of version 1"):
        fetch_policy(store, 2, tmp_path / "fetched")


def as_older_versions_wrote_it(store: MemoryStore, version: int) -> None:
    """Replace a commit with one as an older release wrote it: with a digest of files but not of
    weights."""
    body = read_commit(store, keys.policy(version))
    files = files_in(body)
    old = {"version": version, "sha256": policy_digest(files), "files": file_list(files)}
    store.delete(keys.policy(version))
    commit(store, keys.policy(version), old, "aa")


def test_the_weights_digest_of_a_policy_of_an_older_release_is_computed(tmp_path):
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
    """The commit of policy 0 still lists the files and the weights digest from run.json."""
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


def test_only_policies_of_older_releases_may_have_files_other_than_safetensors(tmp_path):
    """Older commits contain a digest of the files, so the files may hold any bytes."""
    store = MemoryStore()
    whole_run(store, tmp_path)
    key = keys.policy_file(2, "00000000", "model.safetensors")
    refer_policy(store, 2, [put_data(store, key, b"weights")], "0" * 64)
    [problem] = verify(store).problems
    assert (problem.key, problem.text) == (
        keys.policy(2),
        f"{key} is not a complete safetensors file",
    )
    as_older_versions_wrote_it(store, 2)
    assert not verify(store).problems
