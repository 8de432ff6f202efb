"""Converts between one array per sample and one array of all response tokens.

Dimensions: T response tokens, concatenated sample by sample; G response tokens in a sample.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BySample = Mapping[str, npt.NDArray[Any]]
"""Values of response tokens, [G] each, keyed by sample id."""


def joined(dtype: type, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Join the samples' values into one array [T] of the given type."""
    values_T: npt.NDArray[Any] = np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)
    return values_T


def split(ids: Sequence[str], lengths: Sequence[int], values_T: npt.NDArray[Any]) -> BySample:
    """Split an array of all tokens into the samples' arrays.

    Args:
        ids: Sample ids, in order.
        lengths: Number of tokens in each sample.
        values_T: Values for all tokens.

    Returns:
        Values, [G] each, keyed by sample id.
    """
    ends = np.cumsum(np.array(lengths, np.int64))[:-1]
    return dict(zip(ids, np.split(values_T, ends), strict=True)) if ids else {}
