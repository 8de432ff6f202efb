"""The changes to a rank's tensors since the previous version."""

import os
import tracemalloc

import numpy as np
import pytest

from operators.training.publish.kept import KeptShare
from pipeline.policies.coding import apply
from pipeline.policies.difference import read_difference
from pipeline.policies.weights import TensorPlace
from pipeline.store import StoreError

FILES = [
    [TensorPlace("a", "BF16", (2, 3), 0, 12), TensorPlace("none", "F32", (0,), 12, 12)],
    [TensorPlace("b", "F32", (2,), 0, 8)],
]


def version(a: list[int], b: list[int]):
    arrays = np.array(a, "<u2"), np.array([], "<u4"), np.array(b, "<u4")
    return iter([memoryview(array.tobytes()) for array in arrays])


def test_changed_tensors_are_coded_and_the_new_version_is_kept(tmp_path):
    kept = KeptShare(tmp_path, FILES)
    first = kept.update(version([1, 2, 3, 4, 5, 6], [7, 8]), compare=False)
    assert not first.names
    assert first.counts.values == 8
    old = [bytes(content) for content in kept.contents()]
    second = kept.update(version([1, 2, 3, 4, 9, 6], [7, 8]), compare=True)
    assert second.names == {"a"}
    assert (second.counts.tensors, second.counts.changed) == (1, 1)
    assert second.counts.coded_bytes == second.writer.coded_bytes > 0
    assert second.tensors[1:] == first.tensors[1:]
    coded = read_difference(b"".join(second.writer.pieces()))
    patched = bytearray(old[0])
    apply(coded["a"], patched)
    assert [bytes(patched), *old[1:]] == [bytes(content) for content in kept.contents()]
    third = kept.update(version([1, 2, 3, 4, 9, 6], [7, 8]), compare=True)
    assert not third.names
    assert read_difference(b"".join(third.writer.pieces())) == {}


def test_an_update_takes_little_memory_however_large_a_tensor_is(tmp_path):
    old = np.zeros(1 << 25, np.uint16)
    new = old.copy()
    new[::30] = 1
    kept = KeptShare(tmp_path, [[TensorPlace("a", "BF16", old.shape, 0, old.nbytes)]])
    kept.update(iter([memoryview(old).cast("B")]), compare=False)
    tracemalloc.start()
    changes = kept.update(iter([memoryview(new).cast("B")]), compare=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert changes.counts.changed == len(new[::30])
    assert peak < old.nbytes / 6


def test_a_full_disk_is_detected_before_training(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"No space.*TMPDIR.*store.policy_deltas.enable=false"):
        KeptShare(tmp_path, FILES)
