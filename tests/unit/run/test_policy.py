"""A policy version is fetched whole and right, or refused."""

import pytest

from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from pipeline.run.policy import fetch_policy, publish_policy
from tests.memory_store import MemoryStore
from tests.stored_runs import whole_run


def test_a_damaged_policy_is_refused(tmp_path):
    """Its good files may be there; the damaged one is not."""
    store, source = MemoryStore(), tmp_path / "policy"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"weights")
    (file,) = publish_policy(store, 1, source).body["files"]
    store.objects[file["key"]] = b"WEIGHTS"
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
