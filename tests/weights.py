"""Small safetensors files, written as docs/trace-format.md describes them."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipeline.policies.weights import read_weights, weights_digest

DTYPES = {"float32": "F32", "float16": "F16", "int64": "I64"} | {
    f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)
}


def safetensors(tensors: Mapping[str, np.ndarray], **metadata: str) -> bytes:
    """Return a file that contains these tensors, in the given order."""
    header: dict = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, array in tensors.items():
        place = [len(data), len(data) + array.nbytes]
        dtype = DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": place}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def some_weights(seed: int = 0, size: int = 6) -> bytes:
    """Return a file with two tensors, whose contents depend on the seed."""
    rng = np.random.default_rng(seed)
    arrays = [rng.random(size, np.float32), rng.integers(0, 99, (2, 3))]
    return safetensors(dict(zip(("gate.weight", "position_ids"), arrays, strict=True)))


def digest_of(folder: Path) -> str:
    """Return the weights digest of a folder."""
    return weights_digest(read_weights(path) for path in sorted(folder.glob("*.safetensors")))
