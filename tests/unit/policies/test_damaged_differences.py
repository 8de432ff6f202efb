"""Damage in any field of a difference or of its share is refused before an engine loads it.

This module parses coded bytes according to docs/policy-format.md, independently of the project's
reader. Digests of files and commits always match, as if the damaged bytes had been committed.
"""

import io
import json
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.policies import coding
from pipeline.policies.coding import CodingError, apply, encode
from pipeline.policies.difference import DifferenceWriter
from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import digests_of
from pipeline.run.commit import CorruptObjectError
from tests.exhaustive import sample_or_all
from tests.memory_store import MemoryStore
from tests.policies import forge, write_policy
from tests.weights import safetensors

SMALL_BLOCK = 1 << 12
DTYPES = {"router": "<u4", "gate": "<u2", "ids": "<u8", "mask": "<u1", "few": "<u2", "same": "<u2"}
SHARES = {"router": 0.9, "gate": 0.1, "ids": 0.02, "mask": 0.3, "few": 0.001, "same": 0.0}
CHANGED = sorted(DTYPES.keys() - {"same"})
FILE = "difference-00001-of-00001.safetensors"
CASES = sample_or_all(60, 1500)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**65) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=4,
)


class Field(NamedTuple):
    """A number or plane in the coded bytes. Example: Field('words', 1, 8)."""

    name: str
    at: int
    size: int


def fields(coded: bytes, block: int) -> Iterator[Field]:
    """Yield every field of a coded tensor."""
    yield from (Field("width", 0, 1), Field("words", 1, 8))
    words = struct.unpack_from("<Q", coded, 1)[0]
    at = 9
    for _ in range(0, words, block):
        yield Field("changes", at, 4)
        (changes,) = struct.unpack_from("<I", coded, at)
        at += 4
        if not changes:
            continue
        gaps, steps = coded[at], coded[at + 1]
        yield from (Field("gap planes", at, 1), Field("step planes", at + 1, 1))
        at += 2
        sizes = struct.unpack_from(f"<{gaps + steps}I", coded, at)
        for plane in range(gaps + steps):
            yield Field("stored", at + 4 * plane, 4)
        at += 4 * len(sizes)
        for plane, size in enumerate(sizes):
            yield Field("gaps" if plane < gaps else "steps", at, size)
            at += size
    assert at == len(coded)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "BLOCK", SMALL_BLOCK)


@cache
def versions() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return former and new tensors of every width, with three full blocks and a partial one."""
    rng = np.random.default_rng(0)
    old, new = {}, {}
    for name, dtype in DTYPES.items():
        former = rng.integers(0, 1 << 16, 3 * SMALL_BLOCK + 99).astype(dtype)
        steps = rng.integers(-3, 4, former.size).astype(dtype)
        changed = np.where(rng.random(former.size) < SHARES[name], former + steps, former)
        old[name], new[name] = former, changed.astype(dtype)
    return old, new


@cache
def right() -> dict[str, bytes]:
    """Return the coded tensors that change."""
    old, new = versions()
    found = {name: encode(old[name], new[name], new[name].itemsize) for name in DTYPES}
    return {name: coded for name, coded in found.items() if coded is not None}


@cache
def stored() -> dict[str, bytes]:
    """Return the objects of a store with the whole version 0 and its difference, version 1."""
    store, (old, new) = MemoryStore(), versions()
    write_policy(store, 0, old, ranks=1)
    write_policy(store, 1, new, old, ranks=1)
    return store.objects


@cache
def places() -> list[tuple[str, Field]]:
    """Return every field of every coded tensor, with the tensor's name."""
    coded = right()
    return [(name, field) for name in coded for field in fields(coded[name], SMALL_BLOCK)]


def file_of(coded: dict[str, bytes]) -> bytes:
    writer = DifferenceWriter(io.BytesIO())
    for name, data in coded.items():
        writer.add(name, data)
    return b"".join(writer.pieces())


def loaded(
    data: bytes, edit: Callable[[dict[str, Any]], object] = lambda share: None
) -> bytes | None:
    """Return the weights file that a worker would load; None if it refuses the version.

    `data` is the difference file, and `edit` changes its share.
    """
    store = MemoryStore(stored())
    forge(store, 1, {FILE: data}, edit)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own)
        try:
            digest = fetch_policy(store, 1, folder)
        except CorruptObjectError:
            assert list(folder.iterdir()) == []
            return None
        assert digest == digests_of(folder).weights
        return (folder / "model-00001-of-00001.safetensors").read_bytes()


def expected() -> bytes:
    new = versions()[1]
    return safetensors({name: new[name] for name in sorted(new)})


def assert_never_wrong(
    data: bytes, edit: Callable[[dict[str, Any]], object] = lambda share: None
) -> None:
    assert loaded(data, edit) in (None, expected())


def test_an_undamaged_file_is_loaded():
    assert sorted(right()) == CHANGED
    assert loaded(file_of(right())) == expected()


def test_the_cases_have_every_kind_of_field():
    kinds = {field.name for _, field in places()}
    numbers = {"width", "words", "changes", "gap planes", "step planes", "stored"}
    assert kinds == {*numbers, "gaps", "steps"}
    compressed = {
        data[field.at : field.at + 4] == b"\x28\xb5\x2f\xfd"
        for data in right().values()
        for field in fields(data, SMALL_BLOCK)
        if field.name == "gaps"
    }
    assert compressed == {True, False}, "compressed and plain gaps, by zstd's magic number"


@given(place=st.integers(0, 10**6), value=st.integers(0, 2**64 - 1), near=st.integers(-3, 3))
@settings(max_examples=CASES, deadline=None)
@example(place=1, value=2**63, near=0)
def test_a_different_value_in_any_field_is_never_loaded(place: int, value: int, near: int):
    """Numbers change slightly or arbitrarily, or a byte of a plane changes."""
    coded = dict(right())
    name, field = places()[place % len(places())]
    data = bytearray(coded[name])
    if field.name in ("gaps", "steps"):
        at = field.at + value % field.size
        data[at] = (data[at] + (near or 128)) % 256
    else:
        was = int.from_bytes(data[field.at : field.at + field.size], "little")
        now = (was + near if near else value) % (1 << 8 * field.size)
        data[field.at : field.at + field.size] = now.to_bytes(field.size, "little")
    coded[name] = bytes(data)
    if coded[name] != right()[name]:
        assert_never_wrong(file_of(coded))
        if field.name in ("width", "words"):
            assert loaded(file_of(coded)) is None


def test_incorrect_numbers_are_refused_without_digests():
    """A number that is too large or too small by one is detected from lengths alone."""
    old, coded = versions()[0], right()
    for name, field in places():
        if field.name in ("gaps", "steps"):
            continue
        for near in (1, -1):
            data = bytearray(coded[name])
            was = int.from_bytes(data[field.at : field.at + field.size], "little")
            now = (was + near) % (1 << 8 * field.size)
            data[field.at : field.at + field.size] = now.to_bytes(field.size, "little")
            with pytest.raises(CodingError):
                apply(bytes(data), bytearray(old[name].tobytes()))


@given(
    at=st.floats(0, 1, exclude_max=True),
    length=st.integers(0, 40),
    junk=st.binary(max_size=40),
    header=st.booleans(),
)
@settings(max_examples=CASES, deadline=None)
def test_cut_stretched_and_overwritten_files_are_never_loaded(
    at: float, length: int, junk: bytes, header: bool
):
    data = file_of(right())
    begin = int(at * (200 if header else len(data)))
    damaged = data[:begin] + junk + data[begin + length :]
    if damaged != data:
        assert_never_wrong(damaged)
        if len(damaged) != len(data):
            assert loaded(damaged) is None or header


@given(
    name=st.sampled_from(CHANGED),
    key=st.sampled_from(["dtype", "shape", "data_offsets", "name", "all", "exchange"]),
    value=JSON,
    other=st.sampled_from(CHANGED),
)
@settings(max_examples=CASES, deadline=None)
@example(name="gate", key="exchange", value=None, other="few")
def test_a_different_value_in_the_header_is_never_loaded(
    name: str, key: str, value: object, other: str
):
    """A field of an entry changes, or two entries exchange their names."""
    data = file_of(right())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if key == "name":
        header[str(value)] = header.pop(name)
    elif key == "all":
        header["__metadata__"] = value
    elif key == "exchange":
        header[name], header[other] = header[other], header[name]
    else:
        header[name][key] = value
    text = json.dumps(header).encode()
    assert_never_wrong(len(text).to_bytes(8, "little") + text + data[8 + length :])


@given(
    edits=st.lists(
        st.tuples(st.sampled_from([*DTYPES, "absent"]), st.none() | st.sampled_from(CHANGED)),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=CASES, deadline=None)
@example([("few", None)])
def test_dropped_exchanged_and_added_entries_are_never_loaded(edits: list[tuple[str, str | None]]):
    """An entry is dropped, or it holds the coded bytes of a different tensor."""
    entries = {name: name for name in right()}
    for name, source in edits:
        if source is None:
            entries.pop(name, None)
        else:
            entries[name] = source
    found = loaded(file_of({name: right()[source] for name, source in entries.items()}))
    same = entries == {name: name for name in right()}
    assert found == (expected() if same else None)


@given(
    row=st.integers(0, len(DTYPES) - 1),
    other=st.integers(0, len(DTYPES) - 1),
    change=st.sampled_from(["value", "other", "drop", "repeat", "exchange"]),
    column=st.integers(0, 4),
    value=JSON | st.sampled_from([FILE, "0" * 64, [1], list(DTYPES)]),
)
@settings(max_examples=CASES, deadline=None)
@example(row=5, other=0, change="value", column=3, value="0" * 64)
@example(row=0, other=0, change="value", column=4, value=None)
def test_a_different_tensor_in_the_share_is_never_loaded(
    row: int, other: int, change: str, column: int, value: object
):
    """A tensor's name, dtype, shape, digest or file changes, or a tensor is dropped or repeated."""

    def edit(share: dict[str, Any]) -> None:
        tensors = share["tensors"]
        assert [of[0] for of in tensors] == sorted(DTYPES)
        one, two = tensors[row], tensors[other]
        if change == "drop":
            del tensors[row]
        elif change == "repeat":
            tensors[row] = two
        elif change == "exchange":
            one[column], two[column] = two[column], one[column]
        else:
            one[column] = value if change == "value" else two[column]

    assert_never_wrong(file_of(right()), edit)


@given(key=st.sampled_from(["version", "attempt", "files", "tensors"]), value=JSON)
@settings(max_examples=CASES // 4, deadline=None)
@example(key="tensors", value=[])
def test_a_share_with_a_different_value_is_refused(key: str, value: object):
    found: list[object] = []

    def edit(share: dict[str, Any]) -> None:
        found.append(share[key])
        share[key] = value

    result = loaded(file_of(right()), edit)
    same = json.dumps(found) == json.dumps([value])
    assert result == (expected() if same else None)


def test_coded_bytes_of_another_tensor_are_detected():
    """If both tensors have the same size, only the digest detects the swap."""
    old, coded = versions()[0], right()
    swapped = coded | {"gate": coded["few"], "few": coded["gate"]}
    apply(swapped["gate"], bytearray(old["gate"].tobytes()))
    assert loaded(file_of(swapped)) is None
    assert loaded(file_of(coded | {"gate": coded["router"]})) is None


def test_memory_is_bounded_by_a_block(monkeypatch: pytest.MonkeyPatch):
    """Planes of zeros compress to almost nothing; eight blocks of them expand to 64 MB."""
    monkeypatch.setattr(coding, "BLOCK", 1 << 20)
    words = 8 * coding.BLOCK
    plane = coding._ZSTD.compress(bytes(coding.BLOCK), asbytes=True)
    sizes = struct.pack("<I", len(plane)) * 8
    block = struct.pack("<IBB", coding.BLOCK, 0, 8) + sizes + plane * 8
    coded, target = struct.pack("<BQ", 8, words) + block * 8, bytearray(8 * words)
    tracemalloc.start()
    try:
        apply(coded, target)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48e6
    assert not any(target)
