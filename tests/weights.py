"""Small safetensors files, made as docs/trace-format.md describes them."""

import json
from collections.abc import Mapping

import numpy as np

_DTYPES = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8"}


def safetensors(tensors: Mapping[str, np.ndarray], **metadata: str) -> bytes:
    """A file of these tensors, in their order."""
    header: dict = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, array in tensors.items():
        place = [len(data), len(data) + array.nbytes]
        dtype = _DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": place}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def some_weights(seed: int = 0, size: int = 6) -> bytes:
    """A file of two tensors, other ones for each seed."""
    rng = np.random.default_rng(seed)
    arrays = [rng.random(size, np.float32), rng.integers(0, 99, (2, 3))]
    return safetensors(dict(zip(("gate.weight", "position_ids"), arrays, strict=True)))
