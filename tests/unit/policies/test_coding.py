"""Decoding restores every bit, whatever its meaning, and refuses inconsistent bytes."""

import struct
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.policies import coding
from pipeline.policies.coding import CodingError, apply, count_changes, encode, head_of
from tests.exhaustive import sample_or_all

WIDTHS = coding.WIDTHS


def patched(old: bytes, coded: bytes | None) -> bytes:
    target = bytearray(old)
    if coded is not None:
        apply(coded, target)
    return bytes(target)


def some_words(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    return rng.integers(0, 256, count * width, np.uint8).view(f"<u{width}")


def changed_words(rng: np.random.Generator, old: np.ndarray, share: float, most: int) -> np.ndarray:
    """Add or subtract less than `most` from a share of the words, with wrap-around."""
    steps = rng.integers(1, most, old.size, np.uint64).astype(old.dtype)
    sign = rng.integers(0, 2, old.size).astype(bool)
    moved = np.where(sign, old + steps, old - steps)
    return np.where(rng.random(old.size) < share, moved, old).astype(old.dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0, 1e-5, 0.001, 0.03, 0.3, 0.7, 1])
@pytest.mark.parametrize("most", [2, 100, 2**40])
def test_coded_words_are_restored(
    width: int, share: float, most: int, monkeypatch: pytest.MonkeyPatch
):
    """The words fill two blocks and a part of a third one."""
    monkeypatch.setattr(coding, "BLOCK", 1 << 17)
    rng = np.random.default_rng(0)
    old = some_words(rng, 2 * coding.BLOCK + 12345, width)
    new = changed_words(rng, old, share, most)
    coded = encode(old, new, width)
    assert (coded is None) == (old == new).all()
    assert patched(old.tobytes(), coded) == new.tobytes()
    if coded is not None:
        assert head_of(coded) == (width, old.size)
        assert count_changes(coded) == np.count_nonzero(old != new)
        assert len(coded) < old.nbytes + 100, "at most slightly larger than the tensor"


@st.composite
def pairs(draw: st.DrawFn) -> tuple[int, bytes, bytes]:
    """Draw two versions of a small tensor, with some words changed."""
    width = draw(st.sampled_from(WIDTHS))
    count = draw(st.integers(0, 600))
    old = draw(st.binary(min_size=count * width, max_size=count * width))
    new = bytearray(old)
    if count:
        for place in draw(st.sets(st.integers(0, count - 1))):
            word = draw(st.binary(min_size=width, max_size=width))
            new[place * width : (place + 1) * width] = word
    return width, old, bytes(new)


@given(pairs())
@settings(max_examples=sample_or_all(150, 2000), deadline=None)
def test_any_two_versions_are_restored(pair: tuple[int, bytes, bytes]):
    width, old, new = pair
    coded = encode(old, new, width)
    assert (coded is None) == (old == new)
    assert patched(old, coded) == new
    changes = np.count_nonzero(np.frombuffer(old, f"<u{width}") != np.frombuffer(new, f"<u{width}"))
    assert changes == (0 if coded is None else count_changes(coded))


def test_every_pair_of_sixteen_bit_patterns_is_restored():
    """NaNs with payloads, both zeros, infinities and denormals are restored as bit patterns."""
    all_words = np.arange(2**16, dtype=np.uint16)
    rng = np.random.default_rng(1)
    others = [rng.permutation(all_words), all_words ^ 0x8000, all_words + 1, all_words - 1]
    for other in others:
        coded = encode(all_words, other, 2)
        assert patched(all_words.tobytes(), coded) == other.astype("<u2").tobytes()


@pytest.mark.parametrize("width", WIDTHS)
def test_empty_and_scalar_tensors_are_restored(width: int):
    assert encode(b"", b"", width) is None
    one, other = bytes(width), b"\1" * width
    coded = encode(one, other, width)
    assert patched(one, coded) == other
    scalar = np.array(7, f"<u{width}")
    assert patched(scalar.tobytes(), encode(scalar, scalar + 1, width)) == bytes([8]) + bytes(
        width - 1
    )


def test_bytes_at_odd_addresses_are_patched():
    """A safetensors file may place its tensors at addresses that are not multiples of a word."""
    rng = np.random.default_rng(2)
    old = some_words(rng, 5000, 4)
    new = changed_words(rng, old, 0.1, 5)
    target = bytearray(b"x") + old.tobytes() + b"y"
    odd = bytearray(b"x") + new.tobytes()
    view = memoryview(target)[1:-1]
    coded = encode(view, memoryview(odd)[1:], 4)
    assert coded == encode(old, new, 4)
    apply(coded, view)
    assert target == b"x" + new.tobytes() + b"y"


def test_incorrect_sizes_are_refused():
    for old, new, width in ((4, 6, 2), (5, 5, 2), (6, 6, 3)):
        with pytest.raises(ValueError, match="bytes"):
            encode(bytes(old), bytes(new), width)
    with pytest.raises(ValueError, match="map its file for writing"):
        apply(encode(bytes(6), b"\1" * 6, 2), bytes(6))


# Forged coded tensors, each with one error.


def block(changes: int, gaps: list[bytes], steps: list[bytes]) -> bytes:
    planes = [*gaps, *steps]
    counts = struct.pack("<IBB", changes, len(gaps), len(steps))
    return counts + b"".join(struct.pack("<I", len(plane)) for plane in planes) + b"".join(planes)


def coded_tensor(*blocks: bytes, width: int = 2, words: int = 300) -> bytes:
    return struct.pack("<BQ", width, words) + b"".join(blocks)


def compressed(data: bytes) -> bytes:
    return pa.Codec("zstd", compression_level=1).compress(data, asbytes=True)


def test_forged_tensors_without_an_error_are_accepted():
    coded = coded_tensor(block(2, [b"\xff\x2b"], [b"\2\1"]))
    expected = np.zeros(300, np.uint16)
    expected[255], expected[299] = 1, 0xFFFF
    assert patched(bytes(600), coded) == expected.tobytes()
    zeros = compressed(bytes(100))
    assert patched(bytes(600), coded_tensor(block(100, [], [zeros]))) == bytes(600)


@pytest.mark.parametrize(
    ("coded", "message"),
    [
        (coded_tensor()[:8], "of 8 bytes"),
        (coded_tensor(width=16, words=0), "words of 16 bytes"),
        (coded_tensor(words=301), "a tensor of 600 bytes"),
        (coded_tensor(bytes(5)), "1 bytes after the last block"),
        (coded_tensor(block(301, [], [bytes(301)])), "301 changes"),
        (coded_tensor(block(1, [b"\0"] * 4, [b"\0"])), "4 planes of gaps"),
        (coded_tensor(block(1, [b"\0"], [b"\1\1"])), "a plane of 2 bytes"),
        (coded_tensor(block(2, [b"\0\0"], [b"\1\1"])[:-1]), "the remaining 1"),
        (coded_tensor(block(2, [b"\xff\x2c"], [b"\2\1"])), "position 300"),
        (coded_tensor(block(100, [], [compressed(bytes(99))])), "100 changes"),
        (coded_tensor(block(100, [], [b"no zstd"])), "100 changes"),
    ],
)
def test_inconsistent_coded_bytes_are_refused(coded: bytes, message: str):
    with pytest.raises(CodingError, match=message):
        apply(coded, bytearray(600))


def test_memory_is_bounded_by_a_block():
    """Planes of zeros compress to almost nothing; eight blocks of them expand to 64 MB."""
    words = 8 * coding.BLOCK
    plane = compressed(bytes(coding.BLOCK))
    target = bytearray(8 * words)
    tracemalloc.start()
    try:
        planes = block(coding.BLOCK, [], [plane] * 8)
        apply(coded_tensor(*[planes] * 8, width=8, words=words), target)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48e6
    assert not any(target)


def test_lengths_are_checked_before_a_byte_changes():
    good = block(1, [], [b"\2"])
    words = coding.BLOCK + 5
    target = bytearray(2 * words)
    with pytest.raises(CodingError, match="bytes after the last block"):
        apply(coded_tensor(good, good + b"x", words=words), target)
    assert not any(target)
