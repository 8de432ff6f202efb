import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.traces import Geometry, Routes, TraceError
from pipeline.traces.format.codec import (
    canonical,
    canonical_samples,
    checked,
    coding,
    decode,
    decode_segments,
    encode,
)
from tests.samples import random_sets


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Geometry, int, np.random.Generator]:
    """Draw a one-layer geometry (E up to 1024, K up to 16), a number of rows and a generator."""
    experts = draw(st.one_of(st.integers(1, 1024), st.sampled_from([255, 256, 257])))
    topk = draw(st.integers(1, min(16, experts)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Geometry(experts, topk, (0,)), draw(st.integers(0, 40)), rng


@given(shapes(), st.booleans())
def test_decoding_returns_the_encoded_sets(shape, as_gaps):
    """Decoding returns the encoded sets, sorted. A row takes K or 2K bytes."""
    geometry, rows, rng = shape
    sets_TK = random_sets(rng, rows, geometry)[:, 0]
    shuffled_TK = rng.permuted(sets_TK, axis=1)
    stored = coding(geometry.experts, gaps=as_gaps)
    data = encode(shuffled_TK, geometry.experts, stored)
    assert len(data) == rows * geometry.topk * np.dtype(geometry.dtype).itemsize
    found = decode(data, rows, geometry.topk, geometry.experts, stored)
    assert found.dtype == geometry.dtype
    assert np.array_equal(found, sets_TK)


@given(shapes(), st.lists(st.integers(0, 9), max_size=5), st.booleans())
def test_segments_decode_together(shape, tokens, as_gaps):
    """Decoding several segments together, including empty ones, gives the same sets."""
    geometry, _, rng = shape
    sets = [random_sets(rng, rows, geometry)[:, 0] for rows in tokens]
    stored = coding(geometry.experts, gaps=as_gaps)
    parts = [encode(s, geometry.experts, stored) for s in sets]
    found = decode_segments(parts, tokens, geometry.topk, geometry.experts, stored)
    assert np.array_equal(found, np.concatenate([found[:0], *sets]))


@given(
    st.sampled_from([Geometry(1, 1, (0,)), Geometry(16, 4, (1, 3)), Geometry(300, 3, (0, 1, 2))]),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(0, 2**32),
    st.data(),
)
def test_canonical_samples_equal_canonical_of_each_sample(geometry, rows, seed, data):
    """Samples have any integer dtype and any memory layout; some of their rows are not valid."""
    rng = np.random.default_rng(seed)
    samples = []
    for T in rows:
        sets_TLK = rng.permuted(random_sets(rng, T, geometry), axis=2)
        valid_T = rng.random(T) < data.draw(st.sampled_from([0.5, 1]))
        sets_TLK[~valid_T] = 255  # not a set, and out of bounds except with 300 experts
        dtype = data.draw(st.sampled_from([geometry.dtype, np.int64, ">u2"]))
        order = data.draw(st.permutations([0, 1, 2]))
        laid_out = sets_TLK.astype(dtype).transpose(order).copy()
        samples.append(Routes(laid_out.transpose(np.argsort(order)), valid_T))
    found = canonical_samples(samples, geometry, rows)
    for together, alone in zip(
        found,
        (canonical(one, geometry, T) for one, T in zip(samples, rows, strict=True)),
        strict=True,
    ):
        assert together.sets_TLK.dtype == alone.sets_TLK.dtype
        assert np.array_equal(together.sets_TLK, alone.sets_TLK)
        assert np.array_equal(together.valid_T, alone.valid_T)


@pytest.mark.parametrize("wrong", [[[0, 16]], [[3, 3]], [[0, 1], [0, 1]]])
def test_one_wrong_sample_among_several_is_refused(wrong):
    sets = [np.array(ids, np.uint8)[:, None] for ids in ([[1, 0]], wrong)]
    routes = [Routes(sets_TLK, np.ones(len(sets_TLK), np.bool_)) for sets_TLK in sets]
    with pytest.raises(TraceError):
        canonical_samples(routes, Geometry(16, 2, (0,)), [1, 1])


@given(st.binary(max_size=200), st.integers(0, 30), st.integers(1, 8), st.integers(8, 600))
def test_any_bytes_give_sets_or_an_error(data, tokens, topk, experts):
    """If bytes decode at all, each row is a set of K ids below E."""
    try:
        sets_TK = decode(data, tokens, topk, experts).astype(np.int64)
    except TraceError:
        return
    assert sets_TK.shape == (tokens, topk)
    assert (np.diff(sets_TK, axis=1) > 0).all()
    assert (sets_TK < experts).all()


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (np.array([[0, 16]]), "expert id 16: expected 0..15"),
        (np.array([[-1, 3]]), "expert id -1: expected 0..15"),
        (np.array([[1, 2], [3, 3]]), r"row \[1\] contains an expert twice: \[3, 3\]"),
        (np.array([[0.0, 1.0]]), "float64"),
    ],
)
def test_invalid_ids_are_refused(sets, says):
    with pytest.raises(TraceError, match=says):
        checked(sets, 16)


def test_more_than_256_experts_do_not_wrap():
    """Ids above 255 survive with 384 experts; with 256 experts they are refused, not wrapped."""
    sets_TK = np.array([[0, 255, 256, 383]], np.int64)
    assert decode(encode(sets_TK, 384), 1, 4, 384).tolist() == sets_TK.tolist()
    with pytest.raises(TraceError, match="expert id 256: expected 0"):
        encode(sets_TK, 256)


def test_largest_gaps_do_not_wrap():
    """The sum of K gaps of 255 exceeds one byte; it is refused, not reduced modulo 256."""
    with pytest.raises(TraceError, match=r"expert id \d+: expected 0..255"):
        decode(bytes([255] * 16), 1, 16, 256)


def test_the_bytes_of_the_specification():
    assert encode(np.array([[20, 3, 8, 7], [0, 1, 2, 3]]), 64) == bytes([3, 3, 0, 11, 0, 0, 0, 0])
    assert encode(np.array([[1, 300], [2, 3]]), 512) == bytes([1, 42, 2, 0, 0, 1, 0, 0])


@pytest.mark.parametrize(
    "routes",
    [
        Routes(np.zeros((3, 1, 2), np.uint8), np.zeros(4, bool)),
        Routes(np.zeros((4, 1, 3), np.uint8), np.zeros(4, bool)),
        Routes(np.zeros((5, 1, 2), np.uint8), np.zeros(5, bool)),
        Routes(np.zeros((4, 1, 2), np.uint8), np.zeros(4, np.uint8)),
    ],
)
def test_wrong_shapes_are_refused(routes):
    """One row is missing or superfluous, K is wrong, or the validity's dtype is not bool."""
    with pytest.raises(TraceError, match=r"expected"):
        canonical(routes, Geometry(8, 2, (0,)), 4)


def test_invalid_rows_are_stored_as_filler():
    """Such rows are stored as 0..K-1 whatever they contain, and the input array is not changed."""
    sets = np.array([[[7, 7]], [[3, 1]]], np.uint8)
    made = canonical(Routes(sets, np.array([False, True])), Geometry(8, 2, (0,)), 2)
    assert made.sets_TLK.tolist() == [[[0, 1]], [[1, 3]]]
    assert sets.tolist() == [[[7, 7]], [[3, 1]]]


@pytest.mark.parametrize(
    ("ids", "experts", "says"),
    [
        ([[1, 2], [3, 3]], 16, r"ids \[3, 3\]: expected ascending"),
        ([[1, 2], [3, 2]], 300, r"ids \[3, 2\]: expected ascending"),
        ([[0, 1], [2, 16]], 16, "expert id 16: expected 0..15"),
        ([[0, 1], [2, 300]], 300, "expert id 300: expected 0..299"),
    ],
)
def test_invalid_stored_ids_are_refused(ids, experts, says):
    data = np.array(ids, "<u1" if experts <= 256 else "<u2").tobytes()
    with pytest.raises(TraceError, match=says):
        decode(data, 2, 2, experts, coding(experts, gaps=False))


@pytest.mark.parametrize("stored", ["gaps-uint16-planes", "ids-uint16", "", "bitmap"])
def test_a_coding_of_a_different_width_is_refused(stored):
    with pytest.raises(TraceError, match=f"unknown coding '{stored}'"):
        decode(b"\0\1", 1, 2, 16, stored)
