"""The shapes, dtypes and values of the in-memory layouts of verl and slime."""

import numpy as np
import pytest

from pipeline.traces import (
    Geometry,
    Routes,
    TraceError,
    dense_routes,
    to_slime,
    to_verl,
    to_verl_batch,
)

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
    with pytest.raises(TraceError, match="sample 0 of 1 prompt and 3 response tokens"):
        to_verl_batch([ROUTES], [1], SPARSE, prompt_length=3, response_length=2)


def test_unknown_rows_have_distinct_experts_or_the_given_id():
    """In NeMo-RL, -1 means that the token is routed natively."""
    found = dense_routes(ROUTES, SPARSE, np.int16, unknown=-1)
    assert found[2].tolist() == [[0, 0], [-1, -1], [0, 0], [-1, -1]]
    assert found[:2].tolist() == DENSE[:2]


def test_dense_layers_at_the_end_must_be_counted():
    assert to_slime(ROUTES, SPARSE, num_layers=6).shape == (3, 6, 2)
    with pytest.raises(TraceError, match="num_layers is 3"):
        to_slime(ROUTES, SPARSE, num_layers=3)


def test_ids_that_do_not_fit_are_refused():
    routes = Routes(np.array([[[0, 40_000]]], np.uint16), np.ones(1, bool))
    geometry = Geometry(experts=40_001, topk=2, layers=(0,))
    assert to_slime(routes, geometry).tolist() == [[[0, 40_000]]]
    with pytest.raises(TraceError, match="40001 experts do not fit into int16"):
        to_verl(routes, geometry)


def test_arrays_that_would_fill_the_memory_are_refused():
    """A small file may contain routes for a layer with a high number."""
    routes = Routes(np.zeros((100_000, 1, 1), np.uint8), np.ones(100_000, bool))
    with pytest.raises(TraceError, match="take 37 GiB"):
        to_slime(routes, Geometry(1, 1, (99_999,)))
    with pytest.raises(TraceError, match="correct num_layers"):
        to_slime(routes, Geometry(1, 1, (0,)), num_layers=10**9)


def changed(sets=ROUTES.sets_TLK, valid=ROUTES.valid_T):
    return Routes(sets, valid)


SETS = ROUTES.sets_TLK
WRONG = {
    "one layer": changed(SETS[:, :1]),
    "one axis": changed(SETS[0]),
    "a row less": changed(SETS[:2]),
    "an id beyond": changed(SETS + np.array([[[1]]], np.uint8)),
    "an id twice": changed(SETS // 3),
    "floats": changed(SETS.astype(float)),
    "validity as numbers": changed(valid=ROUTES.valid_T.astype(int)),
    "lists": changed(SETS.tolist()),
    "nothing": None,
}


@pytest.mark.parametrize("routes", WRONG.values(), ids=WRONG)
def test_routes_that_do_not_have_the_geometry_are_refused(routes):
    """The routes of one layer must not be copied to all layers."""
    with pytest.raises(TraceError):
        to_slime(routes, SPARSE)
    with pytest.raises(TraceError, match=r"^sample 0: "):
        to_verl_batch([routes], [2], SPARSE, 3, 3)


def test_ids_in_unknown_rows_do_not_matter():
    routes = changed(SETS + np.array([[[0]], [[0]], [[100]]], np.uint8))
    assert to_slime(routes, SPARSE).tolist() == DENSE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("dtype", dtype) for dtype in (np.float32, "x")),
        *(("num_layers", number) for number in (4.0, True, -1)),
        *(("unknown", id) for id in (128, -129, np.arange(2))),
        ("geometry", None),
    ],
)
def test_malformed_arguments_of_a_conversion_are_refused(name, value):
    arguments = {"routes": ROUTES, "geometry": SPARSE, "dtype": np.int8}
    with pytest.raises(TraceError, match=name):
        dense_routes(**arguments | {name: value})


def test_a_batch_may_have_empty_responses_and_no_samples():
    found = to_verl_batch([ROUTES], [4], SPARSE, prompt_length=5, response_length=0)
    assert found.tolist() == [[[[0, 0]] * 4, *DENSE, [[0, 0]] * 4]]
    assert to_verl_batch([], [], SPARSE, 3, 2).shape == (0, 5, 4, 2)


def test_impossible_lengths_are_refused():
    for lengths in ([5], [0], [True], "2", None, [2, 2], [4]):
        with pytest.raises(TraceError, match="prompt"):
            to_verl_batch([ROUTES], lengths, SPARSE, 3, 3)
    for name in ("prompt_length", "response_length"):
        for value in (-1, True, None, 2**40):
            widths = {"prompt_length": 3, "response_length": 3, name: value}
            with pytest.raises(TraceError, match=f"^{name}: {value}"):
                to_verl_batch([ROUTES], [2], SPARSE, **widths)
