"""Conversion of an engine's array to Routes, with all checks on arrival.

The engine's array is [rows, decoder layers, K], one row per position 0..S-2, dense layers filled
with zeros. vLLM's is uint8 up to 256 experts and uint16 above, contiguous in memory (its output
processor joins the pieces of a request's steps when the request has finished), on GPU and CPU.

Letters: T rows, D decoder layers, L MoE layers, K experts per token, E experts.
"""

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from operators.rollout.types import Finished
from pipeline.model.geometry import Geometry
from pipeline.traces.format.codec import checked
from pipeline.traces.format.types import Routes, TraceError

log = logging.getLogger(__name__)


def read_routes(finished: Finished, decoder_layers: int, geometry: Geometry) -> Routes:
    """The routes of a response; without a valid row if the request was aborted before it had any.

    Raises TraceError, naming the sample, for those that are missing, and as `routes_of` does.
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
        f"routes, expected those of {rows} rows: the trainer would choose all its experts itself. "
        "Use an engine build or backend that captures routes"
    )


def routes_of(
    raw_TDK: npt.NDArray[Any],
    rows: int,
    decoder_layers: int,
    geometry: Geometry,
    sample: str,
) -> Routes:
    """The MoE layers of an engine's routes, each row sorted, all rows valid.

    Raises TraceError, naming the sample, when the array is not [rows, decoder_layers, K] of
    integers, an id is not below E, a set holds an expert twice, or all ids are zero.
    """
    expected = (rows, decoder_layers, geometry.topk)
    if raw_TDK.shape != expected:
        raise TraceError(
            f"sample {sample}: the engine returned routes of shape {raw_TDK.shape}, expected "
            f"{expected}: one row for each token but the last, every decoder layer, top-k. "
            "Rows are never padded or cut; remake the step, and report the engine's version"
        )
    if raw_TDK.dtype.kind not in "iu":
        raise TraceError(f"sample {sample}: routes of type {raw_TDK.dtype}, expected integers")
    raw_TLK = _moe_layers(raw_TDK, geometry)
    # All-zero first: a kernel that does not report its choice returns it, and the check below
    # would report it as a duplicate.
    if raw_TLK.size and not raw_TLK.any():
        raise TraceError(
            f"sample {sample}: every id of every MoE layer is 0: the engine's kernel did not "
            "report its choice. Use an engine build or backend that captures routes"
        )
    try:
        sets_TLK = checked(raw_TLK, geometry.experts)
    except TraceError as error:
        raise _wrong_set(raw_TLK, geometry, sample) from error
    return Routes(sets_TLK, np.ones(rows, bool))


def absent_routes(rows: int, geometry: Geometry) -> Routes:
    """Routes without a valid row."""
    shape = (rows, len(geometry.layers), geometry.topk)
    sets_TLK = np.broadcast_to(np.arange(geometry.topk, dtype=geometry.dtype), shape)
    return Routes(np.ascontiguousarray(sets_TLK), np.zeros(rows, bool))


def _moe_layers(raw_TDK: npt.NDArray[Any], geometry: Geometry) -> npt.NDArray[Any]:
    """The MoE layers: a view if they are consecutive, else a copy."""
    first, last = geometry.layers[0], geometry.layers[-1]
    if last - first + 1 == len(geometry.layers):
        return raw_TDK[:, first : last + 1]
    return raw_TDK[:, list(geometry.layers)]


def _wrong_set(raw_TLK: npt.NDArray[Any], geometry: Geometry, sample: str) -> TraceError:
    """The error for the first wrong set, which must exist."""
    sets_TLK = np.sort(raw_TLK, axis=-1)
    wrong_TL = ((sets_TLK < 0) | (sets_TLK >= geometry.experts)).any(-1)
    what = f"an id outside 0..{geometry.experts - 1}"
    if not wrong_TL.any():
        wrong_TL = (sets_TLK[..., 1:] == sets_TLK[..., :-1]).any(-1)
        what = "an expert twice"
    row, place = (int(i) for i in np.argwhere(wrong_TL)[0])
    return TraceError(
        f"sample {sample}: the set of row {row} in layer {geometry.layers[place]} is "
        f"{sets_TLK[row, place].tolist()}: {what} ({wrong_TL.sum()} such places); "
        f"expected {geometry.topk} different ids below {geometry.experts}"
    )
