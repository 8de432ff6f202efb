import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.traces import Geometry, Routes, TraceError, routes_digest, token_digest
from tests.samples import random_sets

GEOMETRY = Geometry(16, 3, (0, 4))


def test_the_token_digest_covers_little_endian_uint32():
    expected = hashlib.sha256(bytes([1, 0, 0, 0, 0, 1, 0, 0])).hexdigest()
    assert token_digest(np.array([1, 256], np.int64)) == expected
    assert token_digest(np.array([1, 256], np.uint32)) == expected


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 256],
        (1, 256),
        np.array([1, 256], ">u4"),
        np.array([1, 0, 256, 0], np.uint32)[::2],
        np.array([1, 256], np.int16),
    ],
)
def test_tokens_may_have_any_integer_type_and_layout(tokens):
    assert token_digest(tokens) == token_digest(np.array([1, 256], np.uint32))


def test_a_sample_without_tokens_has_a_digest():
    assert token_digest([]) == hashlib.sha256().hexdigest()


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([-1], "tokens -1..-1, expected 0..4294967295"),
        ([2**32], "tokens 4294967296..4294967296, expected 0..4294967295"),
        ([2**70], "tokens of type object"),
        ([1.0], "tokens of type float64 and shape (1,), expected integers in one dimension"),
        ([True], "tokens of type bool"),
        ("abc", "tokens of type <U3"),
        (None, "tokens of type object"),
        (5, "tokens of type int64 and shape ()"),
        ([[1, 2]], "tokens of type int64 and shape (1, 2)"),
        (np.zeros((1, 2), np.uint32), "tokens of type uint32 and shape (1, 2)"),
        (np.zeros((0, 2), np.uint32), "tokens of type uint32 and shape (0, 2)"),
        ([[1], [1, 2]], "tokens of type list cannot become an array"),
        (np.ma.masked_array(np.array([1, 2], np.uint32), [0, 1]), "tokens is a masked array"),
    ],
)
def test_tokens_that_are_not_token_ids_have_no_digest(tokens, says):
    """A digest of changed tokens would not belong to any sample."""
    with pytest.raises(TraceError) as refused:
        token_digest(tokens)
    assert str(refused.value).startswith(f"token_digest: {says}")


@pytest.mark.parametrize(
    ("routes", "geometry", "says"),
    [
        (None, GEOMETRY, "routes_digest: routes of type NoneType, expected Routes"),
        (Routes([[[0, 1, 2]] * 2], [True]), GEOMETRY, "sets_TLK of type list, expected an array"),
        (Routes(np.zeros((1, 2, 3), int), [True]), GEOMETRY, "valid_T of type list"),
        (Routes(np.zeros((1, 2, 3), int), np.array(True)), GEOMETRY, "validity bits"),
        (Routes(np.zeros((0, 2, 3), int), np.zeros(0, bool)), None, "geometry None, expected a"),
    ],
)
def test_routes_that_are_not_arrays_have_no_digest(routes, geometry, says):
    with pytest.raises(TraceError) as refused:
        routes_digest(routes, geometry)
    assert says in str(refused.value)


@pytest.mark.parametrize(("experts", "width"), [(16, 1), (256, 1), (257, 2)])
def test_the_routes_digest_is_as_specified(experts, width):
    """An id takes one byte with up to 256 experts, and two bytes with more."""
    sets = np.array([[[0, 1, 2], [3, 4, 15]], [[9, 9, 9], [9, 9, 9]]], np.uint8)
    digest = hashlib.sha256(struct.pack("<3I", 2, experts, 3))
    for id in (0, 1, 2, 0, 1, 2, 3, 4, 15, 0, 1, 2):  # layer by layer
        digest.update(id.to_bytes(width, "little"))
    digest.update(bytes([0b01]))
    found = routes_digest(Routes(sets, np.array([True, False])), Geometry(experts, 3, (0, 4)))
    assert found == digest.hexdigest()


@given(st.integers(0, 2**32), st.integers(1, 20), st.data())
def test_every_change_of_a_valid_row_changes_the_digest(seed, rows, data):
    """A changed id, a changed validity bit and two swapped rows change the digest.

    The order of ids in a row and the content of invalid rows do not.
    """
    rng = np.random.default_rng(seed)
    sets = random_sets(rng, rows, GEOMETRY)
    valid = rng.random(rows) < 0.7
    digest = routes_digest(Routes(sets, valid), GEOMETRY)

    same = rng.permuted(sets, axis=2)
    same[~valid] = 0
    assert routes_digest(Routes(same, valid), GEOMETRY) == digest

    t = data.draw(st.integers(0, rows - 1))
    flipped = valid.copy()
    flipped[t] = not flipped[t]
    assert routes_digest(Routes(sets, flipped), GEOMETRY) != digest
    if valid[t]:
        other = sets.copy()
        absent = sorted(set(range(16)) - set(other[t, 1].tolist()))
        other[t, 1, 0] = absent[0]
        assert routes_digest(Routes(other, valid), GEOMETRY) != digest
    if not np.array_equal(sets[0], sets[t]) and valid[0] and valid[t]:
        swapped = sets.copy()
        swapped[[0, t]] = sets[[t, 0]]
        assert routes_digest(Routes(swapped, valid), GEOMETRY) != digest
