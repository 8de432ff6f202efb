"""Routes in stored form, and the digest of a sample's tokens."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.traces import Geometry, Routes, TraceError, sorted_rows, token_digest
from pipeline.traces.format.routes import ascending, canonical
from tests.samples import random_sets


def test_the_token_digest_covers_little_endian_uint32():
    expected = hashlib.sha256(bytes([1, 0, 0, 0, 0, 1, 0, 0])).hexdigest()
    for tokens in ([1, 256], np.array([1, 256], ">u4"), np.array([1, 0, 256], np.uint32)[::2]):
        assert token_digest(tokens) == expected
    assert token_digest([]) == hashlib.sha256().hexdigest()


@pytest.mark.parametrize(
    "tokens",
    [[-1], [2**32], [1.0], [True], "abc", [[1, 2]], np.ma.masked_array([1, 2], [0, 1])],
)
def test_tokens_that_are_not_token_ids_have_no_digest(tokens):
    """A digest of changed tokens would not belong to any sample."""
    with pytest.raises(TraceError, match=r"^token_digest: tokens"):
        token_digest(tokens)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    experts = draw(st.integers(1, 1024) | st.sampled_from([255, 256, 257, 65_536]))
    topk = draw(st.integers(1, min(16, experts)))
    return Geometry(experts, topk, draw(st.sampled_from([(0,), (1, 3), (0, 1, 2)])))


@given(geometries(), st.integers(0, 40), st.integers(0, 2**32), st.integers(1, 9), st.data())
def test_sets_of_any_order_type_and_layout_are_stored_equally(geometry, rows, seed, block, data):
    """Invalid rows contain 0..K-1, whatever they contained. The input is not changed."""
    rng = np.random.default_rng(seed)
    expected = random_sets(rng, rows, geometry)
    valid = rng.random(rows) < data.draw(st.sampled_from([0.5, 1]))
    expected[~valid] = np.arange(geometry.topk)
    given_TLK = rng.permuted(expected, axis=2)
    given_TLK[~valid] = 255  # not a set, and mostly out of bounds
    axes = data.draw(st.permutations([0, 1, 2]))
    dtype = data.draw(st.sampled_from([geometry.dtype, np.int64, ">u2"]))
    laid_out = given_TLK.astype(dtype).transpose(axes).copy().transpose(np.argsort(axes))
    before = laid_out.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_rows, "BLOCK", block)
        found = canonical(Routes(laid_out, valid), geometry, rows)
    assert np.array_equal(laid_out, before)
    assert found.sets_TLK.dtype == geometry.dtype
    assert np.array_equal(found.sets_TLK, expected)
    assert np.array_equal(found.valid_T, valid)
    assert found.sets_TLK.swapaxes(0, 1).flags.c_contiguous


@pytest.mark.parametrize(
    ("sets", "experts", "says"),
    [
        (np.array([[0, 16]]), 16, "expert id 16"),
        (np.array([[-1, 3]], np.int8), 300, "expert id -1"),
        (np.array([[1, 2], [3, 3]]), 16, r"\[1\] contains an expert twice: \[3, 3\]"),
        (np.array([[0, 256]]), 256, "expert id 256"),  # as uint8, it would be 0
        (np.array([[0.0, 1.0]]), 16, "float64"),
        (np.array([[False, True]]), 16, "bool"),
    ],
)
def test_invalid_ids_are_refused(sets, experts, says):
    with pytest.raises(TraceError, match=says):
        ascending(sets, experts)


@pytest.mark.parametrize(
    "routes",
    [
        Routes(np.zeros((3, 1, 2), np.uint8), np.zeros(4, bool)),
        Routes(np.zeros((4, 1, 3), np.uint8), np.zeros(4, bool)),
        Routes(np.zeros((5, 1, 2), np.uint8), np.zeros(5, bool)),
        Routes(np.zeros((4, 1, 2), np.uint8), np.zeros(4, np.uint8)),
    ],
)
def test_routes_of_another_shape_are_refused(routes):
    with pytest.raises(TraceError, match="expected"):
        canonical(routes, Geometry(8, 2, (0,)), 4)
