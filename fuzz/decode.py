"""Fuzz the decoders of routes, which must return the same sets as the simple ones in this module.

They must also refuse the inputs that the simple decoders refuse. An input contains one or two
segments, or planes. Byte 0 selects the geometry, and byte 1 selects where the second segment
begins. Byte 2 selects whether a length is incorrect, and its two highest bits select the coding.
"""

import atheris
import numpy as np

with atheris.instrument_imports(include=["pipeline"]):
    from pipeline.traces import TraceError
    from pipeline.traces.format.codec import coding, decode_segments, encode
    from pipeline.traces.format.planes import decode_planes, encode_planes

from fuzz.harness import run

GEOMETRIES = [
    (experts, topk)
    for experts in (1, 2, 16, 255, 256, 257, 300, 512, 65_536)
    for topk in (1, 2, 3, 4, 6, 8, 10, 16, 64)
    if topk <= experts
]
"""Pairs (E, K) that lead to both sides of every branch in the decoder."""


def target(data: bytes) -> None:
    """Decode an input and compare the result with the simple decoder's."""
    if len(data) < 3:
        return
    experts, topk = GEOMETRIES[data[0] % len(GEOMETRIES)]
    width = topk * (1 if experts <= 256 else 2)
    coded = data[3:]
    rows = len(coded) // width
    if data[2] & 64:
        compare_planes(coded[: rows * width], rows, topk, experts, data[2] < 128)
        return
    first = data[1] % (rows + 1)
    parts = [coded[: first * width], coded[first * width :]]
    tokens = [first, rows - first + (data[2] % 3 == 1) - (data[2] % 7 == 1)]
    as_gaps = data[2] < 128
    read = plain if as_gaps else plain_ids
    expected = read([*zip(parts, tokens, strict=True)], topk, experts)
    try:
        stored = coding(experts, gaps=as_gaps)
        found = decode_segments(parts, tokens, topk, experts, stored).tolist()
    except TraceError:
        found = None
    if found != expected:
        raise AssertionError(f"E={experts} K={topk} {tokens=}: {found}, expected {expected}")


def compare_planes(coded: bytes, rows: int, topk: int, experts: int, gaps: bool) -> None:
    """Decode planes of `rows` rows and compare the result with the simple decoder's."""
    width = len(coded) // rows if rows else 0
    size = width // topk
    rows_of = [[coded[byte * rows + row] for byte in range(width)] for row in range(rows)]
    expected: list[list[int]] | None = []
    for row in rows_of:
        ids = [int.from_bytes(row[i : i + size], "little") for i in range(0, width, size)]
        if gaps:
            ids = [sum(ids[: k + 1]) + k for k in range(topk)]
        if ids[-1] >= experts or ids != sorted(set(ids)):
            expected = None
            break
        assert expected is not None
        expected.append(ids)
    sets_NK = np.empty((rows, topk), np.uint8 if experts <= 256 else np.uint16)
    found: list[list[int]] | None
    try:
        decode_planes(np.frombuffer(coded, np.uint8), sets_NK, experts, gaps=gaps)
        found = sets_NK.tolist()
    except TraceError:
        found = None
    if found != expected:
        raise AssertionError(f"planes, E={experts} K={topk} {rows=}: {found}, expected {expected}")


def plain(segments: list[tuple[bytes, int]], topk: int, experts: int) -> list[list[int]] | None:
    """Decode gaps as docs/trace-format.md describes.

    Args:
        segments: The coded bytes and the number of tokens for each segment.
        topk: K.
        experts: E.

    Returns:
        The sets; None if the bytes are not valid.
    """
    sets = []
    for data, tokens in segments:
        size = tokens * topk
        if len(data) != size * (1 if experts <= 256 else 2):
            return None
        low, high = data[:size], data[size:] or bytes(size)
        for row in range(tokens):
            ids, last = [], -1
            for i in range(row * topk, (row + 1) * topk):
                last += low[i] + 256 * high[i] + 1
                ids.append(last)
            if last >= experts:
                return None
            sets.append(ids)
    return sets


def plain_ids(segments: list[tuple[bytes, int]], topk: int, experts: int) -> list[list[int]] | None:
    """Decode ids as docs/trace-format.md describes.

    Args:
        segments: The coded bytes and the number of tokens for each segment.
        topk: K.
        experts: E.

    Returns:
        The sets; None if the bytes are not valid.
    """
    sets = []
    width = 1 if experts <= 256 else 2
    for data, tokens in segments:
        if len(data) != tokens * topk * width:
            return None
        found = [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]
        rows = [found[i : i + topk] for i in range(0, len(found), topk)]
        if any(row[-1] >= experts or row != sorted(set(row)) for row in rows):
            return None
        sets += rows
    return sets


def seeds() -> list[bytes]:
    """Return valid inputs for every geometry."""
    rng = np.random.default_rng(0)
    found = []
    for number, (experts, topk) in enumerate(GEOMETRIES):
        sets = np.array([np.sort(rng.choice(experts, topk, replace=False)) for _ in range(5)])
        found.append(bytes([number, 0, 0]) + encode(sets, experts))
        stored = coding(experts, gaps=False)
        found.append(bytes([number, 0, 128]) + encode(sets, experts, stored))
        sets_NK = sets.astype(np.uint8 if experts <= 256 else np.uint16)
        for head, gaps in ((64, True), (192, False)):
            planes = encode_planes(sets_NK, gaps=gaps).tobytes()
            found.append(bytes([number, 0, head]) + planes)
    return found


if __name__ == "__main__":
    run(target, seeds())
