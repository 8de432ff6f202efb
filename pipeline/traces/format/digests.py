"""Digests that tie routes to tokens.

Readers and the trainer compare the digests before they join routes and tokens.
"""

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.traces.format import domain
from pipeline.traces.format.codec import canonical
from pipeline.traces.format.types import Routes, TraceError, check_array


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
    if found.size and not 0 <= found.min() <= found.max() <= domain.MOST_TOKEN:
        raise TraceError(
            f"{where}: tokens {found.min()}..{found.max()}, expected 0..{domain.MOST_TOKEN}"
        )
    return found.astype(np.uint32)


def routes_digest(routes: Routes, geometry: Geometry) -> str:
    """Return the hex SHA-256 of (L, E, K), the sorted sets and the validity bits of a sample.

    L, E and K are little-endian uint32. The sets [L, S-1, K] follow, as uint8 or, above 256
    experts, as little-endian uint16; an invalid row contains 0..K-1. One validity bit per row comes
    last, with the first row in the lowest bit of a byte. Raises TraceError if the routes are not
    arrays, or do not have this geometry.
    """
    domain.check_geometry(geometry, "routes_digest")
    domain.check_routes(routes, "routes_digest")
    return digest_of_canonical(canonical(routes, geometry, routes.valid_T.size), geometry)


def digest_of_canonical(routes: Routes, geometry: Geometry) -> str:
    """Return the routes digest of routes that `codec.canonical` or a reader returned."""
    digest = hashlib.sha256(
        struct.pack("<3I", len(geometry.layers), geometry.experts, geometry.topk)
    )
    width = np.dtype(geometry.dtype).newbyteorder("<")
    digest.update(np.ascontiguousarray(routes.sets_TLK.swapaxes(0, 1), width).data)
    digest.update(validity_bits(routes.valid_T))
    return digest.hexdigest()


def validity_bits(valid_T: npt.NDArray[np.bool_]) -> bytes:
    """Return one bit per row, with the first row in the lowest bit of a byte."""
    if np.count_nonzero(valid_T) == len(valid_T):  # nearly always; much faster than packbits
        return ((1 << len(valid_T)) - 1).to_bytes((len(valid_T) + 7) // 8, "little")
    return np.packbits(valid_T, bitorder="little").tobytes()


def valid_rows(bits: bytes, rows: int, name: str) -> npt.NDArray[np.bool_]:
    """Return whether each row is valid, from the result of `validity_bits`.

    Args:
        bits: One bit per row.
        rows: The number of rows.
        name: The file, for error messages.

    Raises:
        TraceError: The number of bytes is wrong, or an unused bit is set.
    """
    if len(bits) != (rows + 7) // 8:
        raise TraceError(f"{name}: {len(bits)} bytes of validity for {rows} tokens")
    if rows % 8 and bits[-1] >> rows % 8:
        raise TraceError(f"{name}: validity of {rows} tokens with unused bits set")
    found = np.unpackbits(np.frombuffer(bits, np.uint8), count=rows, bitorder="little")
    return found.astype(np.bool_)
