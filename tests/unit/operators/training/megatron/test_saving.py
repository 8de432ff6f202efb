"""The order of a checkpoint's local files and its predecessor's upload."""

import threading

import pytest
import torch.distributed as dist

from operators.training.background import Background
from operators.training.megatron.checkpoint import saving
from operators.training.megatron.checkpoint.saving import CheckpointWriter
from tests.memory_store import MemoryStore
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_checkpoint_begins_when_the_previous_one_is_in_the_store(monkeypatch):
    may_upload = threading.Event()
    uploaded, begun = [], []

    def upload(self, files, prefixes, timeout_s):
        with files:
            assert may_upload.wait(PATIENCE_S)
            uploaded.append(self.version)

    monkeypatch.setattr(saving._Upload, "run", upload)
    monkeypatch.setattr(saving, "layout", lambda model: {})
    monkeypatch.setattr(
        saving, "_save_files", lambda _, version, model: begun.append((version, [*uploaded]))
    )
    with Background() as background:
        writer = CheckpointWriter(MemoryStore(), background, PATIENCE_S)
        writer.save(1, model=None)
        threading.Timer(0.5, may_upload.set).start()
        writer.save(2, model=None)
        background.finish()
    assert begun == [(1, []), (2, [1])]
