"""The coding of a row group's expert sets as planes of bytes.

The rows of all segments of a row group are coded together. The first byte of every row is stored
first, then the second byte of every row, and so on. If experts differ in popularity, each plane has
its own distribution of bytes, and compresses to fewer bytes than the same rows one after another.
If whole rows repeat, the codings of segments (`format.codec`) compress better.

Dimensions: N is the number of rows in a row group, K the number of experts per row, W the number of
bytes per row, and E the number of experts.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.traces.format.types import TraceError


def encode_planes(sets_NK: npt.NDArray[Any], *, gaps: bool) -> npt.NDArray[np.uint8]:
    """Return the bytes [W * N] of a row group in one layer.

    Args:
        sets_NK: Ascending sets: uint8 or, above 256 experts, uint16.
        gaps: Whether to store gaps rather than ids.
    """
    columns_KN = np.empty(sets_NK.T.shape, sets_NK.dtype)
    for k, column_N in enumerate(columns_KN):  # faster than one assignment of sets_NK.T
        column_N[:] = sets_NK[:, k]
    if gaps:
        for k in range(len(columns_KN) - 1, 0, -1):
            columns_KN[k] -= columns_KN[k - 1]
            columns_KN[k] -= 1
    if columns_KN.dtype == np.uint8:
        return columns_KN.reshape(-1)
    planes_WN = np.empty((2 * len(columns_KN), len(sets_NK)), np.uint8)
    planes_WN[::2] = columns_KN & 0xFF
    planes_WN[1::2] = columns_KN >> 8
    return planes_WN.reshape(-1)


def decode_planes(
    data: npt.NDArray[np.uint8], sets_NK: npt.NDArray[Any], experts: int, *, gaps: bool
) -> None:
    """Decode the sets of a row group in one layer.

    Args:
        data: The stored bytes, W * N of them.
        sets_NK: The array to fill: uint8 or, above 256 experts, uint16.
        experts: E, the number of experts in the layer.
        gaps: Whether the bytes are gaps rather than ids.

    Raises:
        TraceError: An id is outside 0..E-1, or the ids in a row do not ascend.
    """
    columns_KN = _columns(data, sets_NK)
    for k in range(1, len(columns_KN)):
        if gaps:
            columns_KN[k] += 1
            columns_KN[k] += columns_KN[k - 1]
        # A sum that overflows is not greater than the previous id.
        ascends_N = columns_KN[k] > columns_KN[k - 1]
        if not ascends_N.all():
            if gaps:
                raise TraceError(f"the gaps of a row add up to more than {experts - 1}")
            row = columns_KN[:, int(ascends_N.argmin())].tolist()
            raise TraceError(f"ids {row}: expected ascending ids")
    if columns_KN.size and (largest := int(columns_KN[-1].max())) >= experts:
        raise TraceError(f"expert id {largest}: expected 0..{experts - 1}")
    for k, column_N in enumerate(columns_KN):
        sets_NK[:, k] = column_N


def _columns(data: npt.NDArray[np.uint8], sets_NK: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a writable array [K, N] of the ids or gaps."""
    planes_WN = data.reshape(sets_NK.shape[1] * sets_NK.itemsize, len(sets_NK))
    if sets_NK.dtype == np.uint8:
        return planes_WN.copy()
    columns_KN = planes_WN[1::2].astype(np.uint16)
    columns_KN <<= 8
    columns_KN |= planes_WN[::2]
    return columns_KN
