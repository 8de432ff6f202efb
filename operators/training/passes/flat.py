"""Values of response tokens by sample, and in a row, sample after sample (T)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BySample = Mapping[str, npt.NDArray[Any]]
"""Values of response tokens, [G] by sample id."""


def joined(dtype: type, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Put values of samples in a row."""
    values_T: npt.NDArray[Any] = np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)
    return values_T


def split(ids: Sequence[str], lengths: Sequence[int], values_T: npt.NDArray[Any]) -> BySample:
    """Cut values of samples in a row, by sample."""
    ends = np.cumsum(np.array(lengths, np.int64))[:-1]
    return dict(zip(ids, np.split(values_T, ends), strict=True)) if ids else {}
