"""The queue of tensors for the thread that writes them."""

import threading

import pytest

from operators.training.publish.buffer import TensorBuffer
from tests.patience import PATIENCE_S


def content(size: int) -> memoryview:
    return memoryview(bytes(size))


def test_tensors_wait_for_space_in_the_buffer():
    """The tensor that is being written still takes up space in the buffer."""
    buffer = TensorBuffer(10, lambda: None)
    buffer.reserve(8)
    buffer.put(content(8))
    reserved = threading.Event()

    def reserve() -> None:
        buffer.reserve(100)
        reserved.set()

    thread = threading.Thread(target=reserve, daemon=True)
    thread.start()
    contents = iter(buffer)
    assert next(contents).nbytes == 8
    assert not reserved.wait(0.05)
    threading.Thread(target=lambda: next(contents), daemon=True).start()
    assert reserved.wait(PATIENCE_S)
    buffer.put(content(100))
    thread.join(PATIENCE_S)


def test_reserve_raises_the_error_of_the_writer():
    def check() -> None:
        raise OSError("disk full")

    buffer = TensorBuffer(1, check)
    buffer.put(content(1))
    with pytest.raises(OSError, match="disk full"):
        buffer.reserve(1)


def test_the_writer_fails_after_drop():
    buffer = TensorBuffer(1, lambda: None)
    buffer.put(content(1))
    contents = iter(buffer)
    next(contents)
    buffer.drop()
    with pytest.raises(RuntimeError, match="the export failed before its last tensor"):
        next(contents)


def test_zero_bytes_always_fit():
    """A rank whose last tensor fills the buffer still takes part in the rounds of other ranks."""

    def check() -> None:
        pytest.fail("waited")

    buffer = TensorBuffer(1, check)
    buffer.reserve(100)
    buffer.put(content(100))
    next(iter(buffer))
    buffer.reserve(0)
