"""The training worker's fetch of policy 0."""

import shutil

import pytest

from operators.training.worker import fetch_model
from pipeline.store import StoreError
from tests.memory_store import MemoryStore
from tests.policies import write_chain


def test_a_disk_too_small_for_the_model_is_named_with_its_own_setting(tmp_path, monkeypatch):
    """Ranks keep the model below TMPDIR, which store.policy_cache does not move."""
    store = MemoryStore()
    write_chain(store, 0, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1))
    with pytest.raises(StoreError) as raised:
        fetch_model(store, tmp_path / "model")
    text = str(raised.value)
    assert text.startswith(f"{tmp_path}/model: found 1 bytes free, expected at least ")
    assert text.endswith("to fetch policy 0; free some space, or set TMPDIR to a larger disk")
