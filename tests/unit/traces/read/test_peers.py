"""The shapes, dtypes and values of the in-memory layouts of verl and slime."""

import numpy as np
import pytest

from pipeline.traces import Geometry, Routes, TraceError
from pipeline.traces.read.peers import dense_routes, to_slime, to_verl, to_verl_batch

ROUTES = Routes(
    np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[0, 1], [0, 1]]], np.uint8),
    np.array([True, True, False]),
)


SPARSE = Geometry(experts=9, topk=2, layers=(1, 3))
"""Layers 0 and 2 are dense. The sample has 4 tokens, and its row 2 is unknown."""


DENSE = [
    [[0, 0], [1, 2], [0, 0], [3, 4]],
    [[0, 0], [5, 6], [0, 0], [7, 8]],
    [[0, 0], [0, 1], [0, 0], [0, 1]],
]


def test_slime_receives_int32_for_every_decoder_layer_and_every_token_except_the_last():
    found = to_slime(ROUTES, SPARSE)
    assert found.dtype == np.int32
    assert found.shape == (3, 4, 2)
    assert found.tolist() == DENSE


def test_verl_receives_int16_with_a_row_of_zeros_for_the_last_token():
    found = to_verl(ROUTES, SPARSE)
    assert found.dtype == np.int16
    assert found.shape == (4, 4, 2)
    assert found.tolist() == [*DENSE, [[0, 0]] * 4]


def test_a_padded_batch_for_verl_has_prompts_on_the_left_and_responses_on_the_right():
    found = to_verl_batch([ROUTES, ROUTES], [1, 3], SPARSE, prompt_length=3, response_length=4)
    assert found.dtype == np.int16
    assert found.shape == (2, 7, 4, 2)
    nothing = [[0, 0]] * 4
    assert found[0].tolist() == [nothing, nothing, *DENSE, nothing, nothing]
    assert found[1].tolist() == [*DENSE, nothing, nothing, nothing, nothing]
    with pytest.raises(
        TraceError, match="sample 0 of 1 prompt and 3 response tokens, expected at most"
    ):
        to_verl_batch([ROUTES], [1], SPARSE, prompt_length=3, response_length=2)


def test_unknown_rows_have_distinct_experts_or_the_given_id():
    """In NeMo-RL, -1 means that the token is routed natively."""
    found = dense_routes(ROUTES, SPARSE, np.int16, unknown=-1)
    assert found[2].tolist() == [[0, 0], [-1, -1], [0, 0], [-1, -1]]
    assert found[:2].tolist() == DENSE[:2]


def test_dense_layers_at_the_end_must_be_counted():
    assert to_slime(ROUTES, SPARSE, num_layers=6).shape == (3, 6, 2)
    with pytest.raises(TraceError, match="num_layers is 3, but the routes contain layer 3: give"):
        to_slime(ROUTES, SPARSE, num_layers=3)


def test_ids_that_do_not_fit_are_refused():
    routes = Routes(np.array([[[0, 40_000]]], np.uint16), np.ones(1, bool))
    geometry = Geometry(experts=40_001, topk=2, layers=(0,))
    assert to_slime(routes, geometry).tolist() == [[[0, 40_000]]]
    with pytest.raises(TraceError, match="40001 experts do not fit into int16, expected at most"):
        to_verl(routes, geometry)


def test_arrays_that_would_fill_the_memory_are_refused():
    """A small file may contain routes for a layer with a high number."""
    routes = Routes(np.zeros((100_000, 1, 1), np.uint8), np.ones(100_000, bool))
    with pytest.raises(TraceError, match="100000 rows in 100000 decoder layers take 37 GiB"):
        to_slime(routes, Geometry(1, 1, (99_999,)))
    with pytest.raises(TraceError, match="expected at most 8; correct num_layers"):
        to_slime(routes, Geometry(1, 1, (0,)), num_layers=10**9)
