"""Routes in stored form: ascending sets of expert ids, checked once, where they enter.

Dimensions: T is the number of rows in a sample, L the number of MoE layers, K the number of experts
per row and E the number of experts.
"""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.traces.format.types import Routes, TraceError, check_array
from pipeline.traces.sorted_rows import is_sorted, sort_rows

_MOST_TOKEN = 2**32 - 1


def canonical(routes: Routes, geometry: Geometry, rows: int) -> Routes:
    """Return routes in stored form: ascending sets, and 0..K-1 in invalid rows.

    Args:
        routes: A sample's routes.
        geometry: The geometry that the routes must have.
        rows: The number of rows that the routes must have.

    Returns:
        Routes whose sets_TLK is a view of an array [L, T, K], so that each layer's rows are
        contiguous in memory, as in a file.

    Raises:
        TraceError: The routes have the wrong shape, or an id is out of range or repeated in a row.
    """
    expected = (rows, len(geometry.layers), geometry.topk)
    if routes.sets_TLK.shape != expected or routes.valid_T.shape != (rows,):
        raise TraceError(
            f"routes of shape {routes.sets_TLK.shape} with {routes.valid_T.shape} validity bits, "
            f"expected {expected} and {(rows,)}: one row per token except the last"
        )
    if routes.valid_T.dtype != np.bool_:
        raise TraceError(f"validity is {routes.valid_T.dtype}, expected bool")
    sets_LTK = routes.sets_TLK.swapaxes(0, 1)
    if np.count_nonzero(routes.valid_T) != rows:  # all() takes 10 times as long for few rows
        sets_LTK = np.array(sets_LTK, order="C")
        sets_LTK[:, ~routes.valid_T] = np.arange(geometry.topk)
    return Routes(ascending(sets_LTK, geometry.experts).swapaxes(0, 1), routes.valid_T.copy())


def ascending(sets: npt.NDArray[Any], experts: int) -> npt.NDArray[Any]:
    """Return expert sets [..., K] in ascending order, as uint8 or, above 256 experts, as uint16.

    Input of any integer dtype is accepted. Raises TraceError for an id outside 0..E-1, and for a
    row that contains an expert twice.
    """
    if sets.ndim < 1 or sets.dtype.kind not in "iu":
        raise TraceError(
            f"expert ids: {sets.dtype} of shape {sets.shape}, expected integers [.., K]"
        )
    dtype = np.uint8 if experts <= 256 else np.uint16
    if sets.size == 0:
        return sets.astype(dtype)
    ours = False
    if sets.dtype != dtype:
        _check_bounds(sets, experts)  # a cast to a smaller type would hide a large or negative id
        sets, ours = sets.astype(dtype, order="C"), True
    if not sets.flags.c_contiguous:
        sets, ours = _contiguous(sets), True
    if not _in_order(sets):
        sets = sets if ours else sets.copy()
        if not sort_rows(sets):
            _check_bounds(sets, experts)
            double = np.argwhere(sets[..., 1:] == sets[..., :-1])[0][:-1]
            row = sets[tuple(double)].tolist()
            raise TraceError(f"row {double.tolist()} contains an expert twice: {row}")
    if sets.max() >= experts:  # three times faster than the maximum of the last column
        _check_bounds(sets, experts)
    return sets


def _in_order(sets: npt.NDArray[Any]) -> bool:
    row = sets.reshape(-1, sets.shape[-1])[0].tolist()
    # If the sets are still in the router's order, the first row usually reveals this.
    return row == sorted(row) and is_sorted(sets)


def _check_bounds(sets: npt.NDArray[Any], experts: int) -> None:
    if sets.max() >= experts or sets.min() < 0:
        found = sets[(sets >= experts) | (sets < 0)].flat[0]
        raise TraceError(f"expert id {found}: expected 0..{experts - 1}")


def _contiguous(sets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a contiguous copy of the sets.

    Each row is copied as one item, which is 3 to 10 times faster than copying each id separately.
    """
    if sets.strides[-1] != sets.itemsize:
        return np.ascontiguousarray(sets)
    row = np.dtype((np.void, sets.shape[-1] * sets.itemsize))
    return np.ascontiguousarray(sets.view(row)).view(sets.dtype)


def token_digest(tokens_S: npt.ArrayLike) -> str:
    """Return the hex SHA-256 of all token ids of a sample as little-endian uint32.

    Raises TraceError unless the tokens are integers in one dimension, from 0 to 2^32 - 1.
    """
    if type(tokens_S) is not np.ndarray or tokens_S.dtype != np.uint32 or tokens_S.ndim != 1:
        tokens_S = check_tokens(tokens_S, "token_digest")
    return hashlib.sha256(np.ascontiguousarray(tokens_S, "<u4").data).hexdigest()


def check_tokens(tokens: npt.ArrayLike, where: str) -> npt.NDArray[np.uint32]:
    """Return a copy of token ids as uint32.

    Raises TraceError unless they are integers in one dimension, from 0 to 2^32 - 1.
    """
    found = check_array(tokens, f"{where}: tokens")
    if found.size == 0:
        found = found.astype(np.uint32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TraceError(
            f"{where}: tokens of type {found.dtype} and shape {found.shape}, expected integers "
            "in one dimension"
        )
    if found.size and not 0 <= found.min() <= found.max() <= _MOST_TOKEN:
        raise TraceError(f"{where}: tokens {found.min()}..{found.max()}, expected 0..{_MOST_TOKEN}")
    return found.astype(np.uint32)
