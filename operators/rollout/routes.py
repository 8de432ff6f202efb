"""Converts and checks the array of routes that an engine returns.

The array is [rows, decoder layers, K]. For a sample of S tokens, it has one row for each of the
positions 0..S-2. Dense layers contain zeros. vLLM returns uint8 for up to 256 experts and uint16
for more, on both GPU and CPU. The arrays are contiguous in memory, because vLLM's output processor
joins the pieces from a request's steps when the request finishes.

Dimensions: T rows, D decoder layers, L MoE layers, K experts per token, E experts.
"""

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from operators.rollout.types import Finished
from pipeline.model.geometry import Geometry
from pipeline.traces.format.routes import ascending
from pipeline.traces.format.types import Routes, TraceError

log = logging.getLogger(__name__)


def read_routes(finished: Finished, decoder_layers: int, geometry: Geometry) -> Routes:
    """Return the checked routes of a response.

    If the engine aborted the request and returned no routes, no row is valid.

    Args:
        finished: The response with the engine's array.
        decoder_layers: The number of decoder layers, including dense ones.
        geometry: The model's geometry.

    Raises:
        TraceError: Routes are missing or invalid (see `routes_of`); the message names the sample.
    """
    request, raw_TDK = finished.request, finished.routes_TDK
    rows = len(request.prompt_tokens) + len(finished.tokens_G) - 1
    if raw_TDK is not None:
        return routes_of(raw_TDK, rows, decoder_layers, geometry, request.id)
    if finished.finish_reason == "abort":
        log.warning("sample %s: aborted without routes; no row is valid", request.id)
        return absent_routes(rows, geometry)
    raise TraceError(
        f"sample {request.id}: the engine ended it with {finished.finish_reason!r} and returned no "
        f"routes, expected routes for {rows} rows: without them the trainer would route all rows "
        "natively; use an engine build or backend that captures routes"
    )


def routes_of(
    raw_TDK: npt.NDArray[Any],
    rows: int,
    decoder_layers: int,
    geometry: Geometry,
    sample: str,
) -> Routes:
    """Return the MoE layers of an engine's routes, with each set sorted and all rows marked valid.

    Args:
        raw_TDK: The engine's array.
        rows: The expected number of rows.
        decoder_layers: The expected number of decoder layers, including dense ones.
        geometry: The model's geometry.
        sample: The sample's id, for error messages.

    Raises:
        TraceError: The array's shape is not [rows, decoder_layers, K], its values are not integers,
            an id is outside 0..E-1, a set contains an expert twice, or all ids are zero. The
            message names the sample.
    """
    expected = (rows, decoder_layers, geometry.topk)
    if raw_TDK.shape != expected:
        raise TraceError(
            f"sample {sample}: the engine returned routes of shape {raw_TDK.shape}, expected "
            f"{expected}: a row per token except the last, all decoder layers, top-k; rows are "
            "never padded or cut; generate the step again, and report the engine's version"
        )
    if raw_TDK.dtype.kind not in "iu":
        raise TraceError(f"sample {sample}: routes of type {raw_TDK.dtype}, expected integers")
    raw_TLK = _moe_layers(raw_TDK, geometry)
    # Check for all zeros first, because a kernel that does not report its choice returns zeros,
    # which the check below would report as duplicates.
    if raw_TLK.size and not raw_TLK.any():
        raise TraceError(
            f"sample {sample}: every id in every MoE layer is 0, so the engine's kernel did not "
            "report its choice; use an engine build or backend that captures routes"
        )
    try:
        # Layer by layer, as the writer needs the rows, so that they are copied only once.
        sets_LTK = ascending(raw_TLK.swapaxes(0, 1), geometry.experts)
    except TraceError as error:
        raise _wrong_set(raw_TLK, geometry, sample) from error
    return Routes(sets_LTK.swapaxes(0, 1), np.ones(rows, bool))


def absent_routes(rows: int, geometry: Geometry) -> Routes:
    """Return routes for `rows` rows, none of which are valid."""
    shape = (rows, len(geometry.layers), geometry.topk)
    sets_TLK = np.broadcast_to(np.arange(geometry.topk, dtype=geometry.dtype), shape)
    return Routes(np.ascontiguousarray(sets_TLK), np.zeros(rows, bool))


def _moe_layers(raw_TDK: npt.NDArray[Any], geometry: Geometry) -> npt.NDArray[Any]:
    """Return the MoE layers of the array: a view if they are consecutive, else a copy."""
    first, last = geometry.layers[0], geometry.layers[-1]
    if last - first + 1 == len(geometry.layers):
        return raw_TDK[:, first : last + 1]
    return raw_TDK[:, list(geometry.layers)]


def _wrong_set(raw_TLK: npt.NDArray[Any], geometry: Geometry, sample: str) -> TraceError:
    """Return the error that names the first invalid set; at least one must be invalid."""
    sets_TLK = np.sort(raw_TLK, axis=-1)
    wrong_TL = ((sets_TLK < 0) | (sets_TLK >= geometry.experts)).any(-1)
    what = f"it contains an id outside 0..{geometry.experts - 1}"
    if not wrong_TL.any():
        wrong_TL = (sets_TLK[..., 1:] == sets_TLK[..., :-1]).any(-1)
        what = "it contains an expert twice"
    row, place = (int(i) for i in np.argwhere(wrong_TL)[0])
    return TraceError(
        f"sample {sample}: the set for row {row} in layer {geometry.layers[place]} is "
        f"{sets_TLK[row, place].tolist()}: {what} ({wrong_TL.sum()} wrong sets in all); "
        f"expected {geometry.topk} different ids below {geometry.experts}"
    )
