"""A policy version is either fetched completely and correctly or refused."""

import pytest

from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import publish_policy, refer_policy, weights_of
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, commit
from tests.data_files import put_data
from tests.memory_store import MemoryStore
from tests.stored_runs import whole_run
from tests.weights import digest_of, some_weights


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


@pytest.mark.parametrize("other", [keys.checkpoint(1), keys.run_json(), keys.policy(1)])
def test_another_commit_is_refused(tmp_path, other):
    store = MemoryStore()
    whole_run(store, tmp_path)
    store.objects[keys.policy(2)] = store.objects[other]
    with pytest.raises(CorruptObjectError, match=r"policy\.json in .*expected that of policy 2"):
        fetch_policy(store, 2, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


def test_the_weights_of_policy_0_are_those_of_the_newest_attempt(tmp_path):
    """The commit of policy 0 still lists the files and the weights digest from run.json."""
    store = MemoryStore()
    whole_run(store, tmp_path)
    first, second = (
        put_data(store, keys.input_file(str(n) * 64, "model.safetensors"), some_weights(n))
        for n in (7, 8)
    )
    refer_policy(store, 0, [first], "0" * 64)
    assert weights_of(store, 0) == "0" * 64
    model = {"model.safetensors": vars(second)}
    commit(store, keys.attempt(1), {"changes": {"inputs.model": model}}, "aa")
    (tmp_path / "model.safetensors").write_bytes(some_weights(8))
    digest = digest_of(tmp_path)
    assert weights_of(store, 0) == fetch_policy(store, 0, tmp_path / "fetched") == digest
