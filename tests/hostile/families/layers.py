"""Changed routes: a layer's coded sets, or the rows' validity.

The sets are swapped, zeroed, shifted, or taken from another sample, step or run.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from tests.hostile.case import Case, Changes, title
from tests.hostile.parquet import rewritten, table_of, with_values
from tests.hostile.remake import remade
from tests.hostile.worlds import WITH_TWINS, twin, world

Coded = list[bytes]


def _zeroed(coded: Coded) -> Coded:
    return [bytes(len(data)) for data in coded]


def _one_zeroed(coded: Coded) -> Coded:
    return [bytes(len(coded[0])), *coded[1:]]


def _shifted(coded: Coded, tokens: list[int]) -> Coded:
    """Find the first segment with several tokens, and shift its rows by one token."""
    at = next((i for i, n in enumerate(tokens) if n > 1), None)
    if at is None:
        return coded
    width = len(coded[at]) // tokens[at]
    moved = coded[at][width:] + coded[at][:width]
    return [*coded[:at], moved, *coded[at + 1 :]]


def _of_another_segment(coded: Coded) -> Coded:
    """Swap the first two segments that have the same length but different sets."""
    for i, one in enumerate(coded):
        for j in range(i + 1, len(coded)):
            if len(one) == len(coded[j]) and one != coded[j]:
                swapped = list(coded)
                swapped[i], swapped[j] = coded[j], one
                return swapped
    return coded


def _bit_flipped(coded: Coded) -> Coded:
    last = max(i for i, data in enumerate(coded) if data)  # after planes, the values are empty
    turned = coded[last][:-1] + bytes([coded[last][-1] ^ 1])
    return [*coded[:last], turned, *coded[last + 1 :]]


def _reversed(coded: Coded) -> Coded:
    return [data[::-1] for data in coded]


def _longer(coded: Coded) -> Coded:
    return [coded[0] + b"\0", *coded[1:]]


def _shorter(coded: Coded) -> Coded:
    return [coded[0][:-1], *coded[1:]]


def _ids_too_large(coded: Coded) -> Coded:
    return [b"\xff" * len(coded[0]), *coded[1:]]


LAYERS: dict[str, Callable[[Coded, list[int]], Coded]] = {
    "zeroed": lambda coded, _: _zeroed(coded),
    "one segment zeroed": lambda coded, _: _one_zeroed(coded),
    "shifted by one token": _shifted,
    "from another segment": lambda coded, _: _of_another_segment(coded),
    "a bit flipped": lambda coded, _: _bit_flipped(coded),
    "bytes reversed": lambda coded, _: _reversed(coded),
    "one byte more": lambda coded, _: _longer(coded),
    "one byte less": lambda coded, _: _shorter(coded),
    "ids too large": lambda coded, _: _ids_too_large(coded),
}

VALIDITY: dict[str, Callable[[bytes | None, int], bytes | None]] = {
    "all valid": lambda bits, _: None,
    "all valid, written out": lambda _, n: np.packbits(
        np.ones(n, bool), bitorder="little"
    ).tobytes(),
    "none valid": lambda _, n: bytes((n + 7) // 8),
    "first flipped": lambda bits, n: _turned(bits, n, 0),
    "last flipped": lambda bits, n: _turned(bits, n, n - 1),
    "one byte more": lambda bits, n: (bits or b"\xff" * ((n + 7) // 8)) + b"\0",
    "one byte less": lambda bits, n: (bits or b"\xff" * ((n + 7) // 8))[:-1],
    "unused bits set": lambda bits, n: _padded(bits, n),
}


def _turned(bits: bytes | None, n: int, at: int) -> bytes:
    valid = np.ones(n, np.uint8)
    if bits is not None:
        valid = np.unpackbits(np.frombuffer(bits, np.uint8), count=n, bitorder="little")
    valid[at] ^= 1
    return np.packbits(valid, bitorder="little").tobytes()


def _padded(bits: bytes | None, n: int) -> bytes | None:
    if not n % 8:
        return bits
    found = bytearray(bits or np.packbits(np.ones(n, bool), bitorder="little").tobytes())
    found[-1] |= 0xFF << (n % 8) & 0xFF
    return bytes(found)


def cases(name: str) -> Iterator[Case]:
    """Yield every change to each layer of a world's routes files, and to their validity.

    All digests are recomputed.
    """
    for key, data in sorted(world(name).items()):
        if not key.endswith(".routes.parquet"):
            continue
        layers = [n for n in table_of(data).column_names if n.startswith("layer_")]
        whats = [*LAYERS, "from another layer", "from another run", "from the other step"]
        for layer in layers:
            for what in whats:
                yield Case(
                    f"layers/{name}:{title(key)}:{layer}/{what}/L1",
                    name,
                    lambda key=key, layer=layer, what=what: _changed(name, key, layer, what),
                )
        for what in VALIDITY:
            yield Case(
                f"layers/{name}:{title(key)}:validity/{what}/L1",
                name,
                lambda key=key, what=what: _validity(name, key, what),
            )
        yield Case(
            f"layers/{name}:{title(key)}:all/swapped/L1", name, lambda key=key: _swapped(name, key)
        )


def _changed(name: str, key: str, layer: str, what: str) -> Changes | None:
    objects = world(name)

    def change(table: pa.Table) -> pa.Table | None:
        coded, tokens = table[layer].to_pylist(), table["tokens"].to_pylist()
        if what in LAYERS:
            found = LAYERS[what](coded, tokens)
        elif what == "from another layer":
            layers = [n for n in table.column_names if n.startswith("layer_")]
            if len(layers) < 2:
                return None
            found = table[layers[layers.index(layer) - 1]].to_pylist()
        else:
            other = _other(name, key, what)
            theirs = None if other is None else table_of(other)
            if theirs is None or layer not in theirs.column_names:
                return None
            found = _fitted(coded, theirs[layer].to_pylist())
        return None if found == coded else with_values(table, layer, found, pa.binary())

    new = rewritten(objects[key], change)
    return None if new is None else remade(objects, {key: new})


def _other(name: str, key: str, what: str) -> bytes | None:
    if what == "from another run":
        return twin(name, False).get(key) if name in WITH_TWINS else None
    other = next(
        (
            found
            for found in sorted(world(name))
            if found.endswith(".routes.parquet") and found.split("/")[1] != key.split("/")[1]
        ),
        None,
    )
    return None if other is None else world(name)[other]


def _fitted(coded: Coded, theirs: Coded) -> Coded:
    """Return the other file's bytes, split into pieces of the same lengths as `coded`."""
    stream = b"".join(theirs) or b"\0"
    stream *= 1 + sum(map(len, coded)) // len(stream)
    found, at = [], 0
    for data in coded:
        found.append(stream[at : at + len(data)])
        at += len(data)
    return found


def _validity(name: str, key: str, what: str) -> Changes | None:
    objects = world(name)

    def change(table: pa.Table) -> pa.Table | None:
        old, tokens = table["validity"].to_pylist(), table["tokens"].to_pylist()
        found = [VALIDITY[what](*pair) for pair in zip(old, tokens, strict=True)]
        if what == "all valid, written out":  # null already means that all rows are valid
            found = [
                new if bits is not None else None for new, bits in zip(found, old, strict=True)
            ]
        return None if found == old else with_values(table, "validity", found, pa.binary())

    new = rewritten(objects[key], change)
    return None if new is None else remade(objects, {key: new})


def _swapped(name: str, key: str) -> Changes | None:
    """Swap two layers."""
    objects = world(name)

    def change(table: pa.Table) -> pa.Table | None:
        layers = [n for n in table.column_names if n.startswith("layer_")]
        if len(layers) < 2:
            return None
        one, two = (table[layer].to_pylist() for layer in (layers[0], layers[-1]))
        table = with_values(table, layers[0], two, pa.binary())
        return with_values(table, layers[-1], one, pa.binary())

    new = rewritten(objects[key], change)
    return None if new is None else remade(objects, {key: new})
