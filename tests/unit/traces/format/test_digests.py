import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.traces import Geometry, Routes, routes_digest, token_digest
from tests.samples import random_sets

GEOMETRY = Geometry(16, 3, (0, 4))


def test_the_token_digest_covers_little_endian_uint32():
    expected = hashlib.sha256(bytes([1, 0, 0, 0, 0, 1, 0, 0])).hexdigest()
    assert token_digest(np.array([1, 256], np.int64)) == expected
    assert token_digest(np.array([1, 256], np.uint32)) == expected


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
