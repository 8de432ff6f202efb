"""Routes from an engine: which arrays are accepted, and which are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.rollout.routes import read_routes, routes_of
from operators.rollout.types import Finished, Request, RolloutError
from pipeline.traces import Geometry, TraceError, VersionSpan

GEOMETRY = Geometry(experts=8, topk=3, layers=(1, 3))
LAYERS = 4


def raw(rows, seed=0, geometry=GEOMETRY, dtype=np.uint8):
    """Return an array like an engine's, with zeros in dense layers and sets in any order."""
    rng = np.random.default_rng(seed)
    routes_TDK = np.zeros((rows, LAYERS, geometry.topk), dtype)
    for row in range(rows):
        for layer in geometry.layers:
            chosen = rng.permutation(geometry.experts)[: geometry.topk]
            routes_TDK[row, layer] = chosen
    return routes_TDK


@given(st.integers(1, 20), st.integers(0, 1000))
def test_moe_layers_are_taken_by_index_and_sorted(rows, seed):
    routes_TDK = raw(rows, seed)
    routes = routes_of(routes_TDK, rows, LAYERS, GEOMETRY, "s")
    assert routes.valid_T.all()
    assert routes.sets_TLK.dtype == np.uint8
    for place, layer in enumerate(GEOMETRY.layers):
        np.testing.assert_array_equal(
            routes.sets_TLK[:, place], np.sort(routes_TDK[:, layer], axis=-1)
        )


def test_ids_above_255_keep_their_values():
    geometry = Geometry(experts=384, topk=2, layers=(0,))
    routes_TDK = np.array([[[300, 2]], [[256, 255]]], np.uint16)
    routes = routes_of(routes_TDK, 2, 1, geometry, "s")
    assert routes.sets_TLK.tolist() == [[[2, 300]], [[255, 256]]]
    assert routes.sets_TLK.dtype == np.uint16


def finished(reason, routes_TDK=None, P=2, G=4):
    """Return a finished engine response; its routes must have P + G - 1 rows."""
    request = Request("000003/1/0", (7,) * P, 0)
    tokens_G, logprobs_G = np.zeros(G, np.uint32), np.zeros(G, np.float32)
    return Finished(request, tokens_G, logprobs_G, routes_TDK, reason, (VersionSpan(0, 0, G),))


def test_an_aborted_response_may_lack_routes():
    routes = read_routes(finished("abort"), LAYERS, GEOMETRY)
    assert not routes.valid_T.any()
    assert routes.sets_TLK.shape == (5, 2, 3)
    assert (np.diff(routes.sets_TLK) > 0).all()


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_finished_response_without_routes_is_refused(reason):
    said = rf"sample 000003/1/0: the engine ended it with '{reason}' and returned no routes.*5 rows"
    with pytest.raises(TraceError, match=said):
        read_routes(finished(reason), LAYERS, GEOMETRY)
    assert read_routes(finished(reason, raw(5)), LAYERS, GEOMETRY).valid_T.all()


@pytest.mark.parametrize("reason", ["None", "error"])
def test_an_unknown_finish_reason_is_refused(reason):
    """Engines report None for a request that is still running."""
    with pytest.raises(RolloutError, match=r"sample 000003/1/0: the engine ended it with '"):
        finished(reason)


@pytest.mark.parametrize("routes_TDK", [raw(0), None])
def test_a_prompt_of_one_token_without_response_has_no_rows(routes_TDK):
    routes = read_routes(finished("abort", routes_TDK, P=1, G=0), LAYERS, GEOMETRY)
    assert routes.sets_TLK.shape == (0, 2, 3)
    assert routes.valid_T.shape == (0,)


@pytest.mark.parametrize(
    "shape", [(4, LAYERS, 3), (6, LAYERS, 3), (5, 2, 3), (5, LAYERS, 2), (5, LAYERS * 3)]
)
def test_an_incorrect_shape_is_refused_instead_of_padded_or_cut(shape):
    """The cases: one row too few, one row too many (S rows), only MoE layers, a different K, and
    only two axes."""
    with pytest.raises(TraceError, match=r"sample 000003/1/0: .*expected \(5, 4, 3\)"):
        routes_of(np.zeros(shape, np.uint8), 5, LAYERS, GEOMETRY, "000003/1/0")


def test_routes_of_only_zeros_are_refused():
    with pytest.raises(TraceError, match=r"sample s: every id in every MoE layer is 0"):
        routes_of(np.zeros((5, LAYERS, 3), np.uint8), 5, LAYERS, GEOMETRY, "s")


@pytest.mark.parametrize("wrong", [[2, 7, 2], [0, 8, 2]])
def test_the_error_for_a_wrong_set_names_row_and_layer(wrong):
    """The sets contain an expert twice, and an id that is not below the number of experts."""
    routes_TDK = raw(5)
    routes_TDK[3, 3] = wrong
    with pytest.raises(TraceError, match=r"sample s: .*row 3 in layer 3"):
        routes_of(routes_TDK, 5, LAYERS, GEOMETRY, "s")
