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


def changed(sets=ROUTES.sets_TLK, valid=ROUTES.valid_T):
    return Routes(sets, valid)


CONVERT = {
    "dense": lambda routes, geometry: dense_routes(routes, geometry, np.int32),
    "slime": to_slime,
    "verl": to_verl,
    "batch": lambda routes, geometry: to_verl_batch([routes], [2], geometry, 3, 3),
}
FIX = "read the routes in all layers of the geometry, in ascending order"
SETS = ROUTES.sets_TLK
WRONG = {
    "one layer": (changed(SETS[:, :1]), f"shape (3, 1, 2), expected (3, 2, 2): {FIX}"),
    "fewer experts": (changed(SETS[..., :1]), f"shape (3, 2, 1), expected (3, 2, 2): {FIX}"),
    "one axis": (changed(SETS[0]), f"shape (2, 2), expected (3, 2, 2): {FIX}"),
    "a row less": (changed(SETS[:2]), "shape (2, 2, 2) with (3,) validity bits"),
    "validity in two axes": (changed(valid=ROUTES.valid_T[:, None]), "validity bits"),
    "an id beyond": (changed(SETS + np.array([[[1]]], np.uint8)), "expert id 9: expected 0..8"),
    "a negative id": (changed(SETS.astype(int) - 2), "expert id -1: expected 0..8"),
    "an id twice": (changed(SETS // 3), "contains an expert twice"),
    "floats": (changed(SETS.astype(float)), "expert ids: float64"),
    "validity as numbers": (changed(valid=ROUTES.valid_T.astype(int)), "validity is int64"),
    "lists": (changed(SETS.tolist()), "sets_TLK of type list, expected an array"),
    "nothing": (None, "routes of type NoneType, expected Routes"),
}


@pytest.mark.parametrize("convert", CONVERT.values(), ids=CONVERT)
@pytest.mark.parametrize(("routes", "says"), WRONG.values(), ids=WRONG)
def test_routes_that_do_not_have_the_geometry_are_refused(convert, routes, says):
    """The routes of one layer must not be copied to all layers."""
    with pytest.raises(TraceError) as refused:
        convert(routes, SPARSE)
    assert says in str(refused.value)


def test_ids_in_unknown_rows_do_not_matter():
    routes = changed(SETS + np.array([[[0]], [[0]], [[100]]], np.uint8))
    assert to_slime(routes, SPARSE).tolist() == DENSE


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": np.float32}, "dtype float32, expected an integer dtype, such as np.int32"),
        ({"dtype": np.bool_}, "dtype bool, expected an integer dtype"),
        ({"dtype": "x"}, "dtype x, expected an integer dtype"),
        ({"dtype": None}, "dtype None, expected an integer dtype"),
        ({"num_layers": 4.0}, "num_layers: 4.0 of type float, expected an integer"),
        ({"num_layers": True}, "num_layers: True of type bool, expected an integer"),
        ({"num_layers": "4"}, "num_layers: 4 of type str, expected an integer"),
        ({"num_layers": -1}, "num_layers: -1, expected 0.."),
        ({"unknown": 128}, "unknown: 128, expected -128..127"),
        ({"unknown": -1, "dtype": np.uint8}, "unknown: -1, expected 0..255"),
        ({"unknown": -1.0}, "unknown: -1.0 of type float, expected an integer"),
        ({"unknown": True}, "unknown: True of type bool, expected an integer"),
        ({"unknown": np.arange(2)}, "of type ndarray, expected an integer"),
        ({"geometry": None}, "geometry None, expected a Geometry"),
    ],
)
def test_malformed_arguments_of_a_conversion_are_refused(changes, says):
    arguments = {"routes": ROUTES, "geometry": SPARSE, "dtype": np.int8}
    with pytest.raises(TraceError) as refused:
        dense_routes(**arguments | changes)
    assert says in str(refused.value)


def test_numbers_may_be_numpy_integers():
    found = dense_routes(ROUTES, SPARSE, np.int8, np.int64(6), np.int16(-1))
    assert found.tolist() == dense_routes(ROUTES, SPARSE, np.int8, 6, -1).tolist()
    batch = to_verl_batch([ROUTES], np.array([2]), SPARSE, np.int64(3), np.int32(2))
    assert batch.tolist() == to_verl_batch([ROUTES], [2], SPARSE, 3, 2).tolist()


def test_a_batch_may_have_empty_responses_and_no_samples():
    found = to_verl_batch(iter([ROUTES]), [4], SPARSE, prompt_length=5, response_length=0)
    assert found.tolist() == [[[[0, 0]] * 4, *DENSE, [[0, 0]] * 4]]
    assert to_verl_batch([], [], SPARSE, 3, 2).shape == (0, 5, 4, 2)


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([5], "prompt length of sample 0: 5, expected 1..4"),
        ([0], "prompt length of sample 0: 0, expected 1..4"),
        ([-1], "prompt length of sample 0: -1, expected 1..4"),
        ([True], "prompt length of sample 0: True of type bool, expected an integer"),
        ([2.0], "prompt length of sample 0: 2.0 of type float, expected an integer"),
        ("2", "prompt_lengths: 2, expected a list of numbers"),
        (None, "prompt_lengths: None, expected a list of numbers"),
        ([], "0 prompt lengths, expected 1, one per sample"),
        ([2, 2], "2 prompt lengths, expected 1, one per sample"),
        ([4], "sample 0 of 4 prompt and 0 response tokens, expected at most 3 and 3"),
    ],
)
def test_impossible_prompt_lengths_are_refused(lengths, says):
    with pytest.raises(TraceError) as refused:
        to_verl_batch([ROUTES], lengths, SPARSE, 3, 3)
    assert says in str(refused.value)


@pytest.mark.parametrize("name", ["prompt_length", "response_length"])
@pytest.mark.parametrize("value", [-1, True, 3.0, None, 2**40])
def test_impossible_widths_of_a_batch_are_refused(name, value):
    with pytest.raises(TraceError, match=f"^{name}: {value}"):
        to_verl_batch(
            [ROUTES], [2], SPARSE, **{"prompt_length": 3, "response_length": 3, name: value}
        )


def test_an_error_names_the_sample_of_a_batch():
    with pytest.raises(TraceError, match=r"^sample 1: routes of shape"):
        to_verl_batch([ROUTES, changed(SETS[:, :1])], [2, 2], SPARSE, 3, 3)
    with pytest.raises(TraceError, match=r"^routes: None, expected a list of Routes"):
        to_verl_batch(None, [2], SPARSE, 3, 3)
