"""The weights digest depends only on the names, dtypes, shapes and bytes of tensors."""

import hashlib
import json
import tracemalloc

import numpy as np
import pytest

from pipeline.policies.weights import (
    parse_header,
    read_stored_weights,
    read_weights,
    scan_weights,
    weights_digest,
)
from pipeline.run.commit import CorruptObjectError, DataFile, sha256
from tests.memory_store import MemoryStore
from tests.weights import safetensors

GATE = np.arange(12, dtype=np.float32).reshape(3, 4)
HEAD = np.arange(5, dtype=np.float16)
IDS = np.array([7, 2**40, -1])
TENSORS = {"model.gate.weight": GATE, "lm_head.weight": HEAD, "ids é": IDS}


def digest(*files: dict[str, np.ndarray]) -> str:
    return weights_digest(scan_weights([safetensors(file)]) for file in files)


def test_the_digest_is_that_of_a_list_of_tensors():
    """The test computes the digest from a list that the test itself writes."""
    rows = [
        ["ids é", "I64", [3], sha256(IDS.tobytes())],
        ["lm_head.weight", "F16", [5], sha256(HEAD.tobytes())],
        ["model.gate.weight", "F32", [3, 4], sha256(GATE.tobytes())],
    ]
    text = json.dumps(rows, separators=(",", ":"))
    assert digest(TENSORS) == hashlib.sha256(text.encode()).hexdigest()


def test_the_digest_does_not_depend_on_the_files_that_hold_the_tensors():
    a, b, c = ({name: array} for name, array in TENSORS.items())
    one = digest(TENSORS)
    assert one == digest(a, b, c) == digest(c, a, b) == digest(a | c, b) == digest(c | b | a)
    assert one == weights_digest([scan_weights([safetensors(TENSORS, format="pt")])])
    assert digest({}) == digest() == digest({}, {})


@pytest.mark.parametrize(
    "other",
    [
        {"model.gate.weight": GATE[::-1].copy()},  # the same experts in a different order
        {"model.gate.weight": GATE.reshape(4, 3)},
        {"model.gate.weight": GATE.view(np.float16)},
        {"model.gate.weight": np.where(GATE, GATE, np.float32(-0.0))},
        {"model.gate.weight": HEAD, "lm_head.weight": GATE},
        {"more": np.zeros(0, np.float32)},
    ],
    ids=["permuted", "transposed", "dtype", "minus zero", "swapped", "empty"],
)
def test_different_tensors_have_a_different_digest(other):
    assert digest(TENSORS | other) != digest(TENSORS)


def test_a_tensor_in_two_files_is_refused():
    with pytest.raises(ValueError, match="tensor a is in two files"):
        digest({"a": HEAD}, {"a": HEAD, "b": IDS})


@pytest.mark.parametrize("size", [1, 3, 7, 64, 10_000])
def test_pieces_may_end_anywhere(size):
    file = safetensors(TENSORS | {"empty": np.zeros((0, 4), np.float32)})
    pieces = [file[at : at + size] for at in range(0, len(file), size)]
    found = scan_weights([b"", *pieces, b""])
    assert found == scan_weights([file])
    assert found.sha256 == sha256(file)
    assert [(t.name, t.shape) for t in found.tensors][:2] == [
        ("model.gate.weight", (3, 4)),
        ("lm_head.weight", (5,)),
    ]


def header(content: object, data: int = 0) -> bytes:
    text = json.dumps(content).encode() if not isinstance(content, bytes) else content
    return len(text).to_bytes(8, "little") + text + bytes(data)


def place(begin: int, end: int, **changes: object) -> dict:
    return {"a": {"dtype": "U8", "shape": [1], "data_offsets": [begin, end], **changes}}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "8 bytes too early"),
        (header({})[:-1], "1 bytes too early"),
        ((10**9).to_bytes(8, "little") + b"{}", "header has 1000000000 bytes"),
        (header(place(0, 9, shape=[9]), 8), "1 bytes too early"),
        (header(place(0, 8, shape=[2, 4]), 9), "has more bytes than the tensors"),
        (header(place(-2, 0), 2), "expected them to begin at 0"),
        (header(place(0, 1) | {"b": place(0, 1)["a"]}, 1), "expected them to begin at 1"),
        (header(place(0, 8, shape=[3], dtype="F32"), 8), "expected 12 for"),
        (header(place(0, 1, shape=[3], dtype="F4"), 1), r"expected 1\.5 for F4"),
        (header(place(0, 8, shape=[8], dtype="F7"), 8), "dtype F7"),
        (header(place(0, 1, shape=[1] * 65), 1), "65 axes"),
        (header(b"\xff{"), "does not describe tensors"),
        (header({"a": {}}), "does not describe tensors"),
    ],
)
def test_an_incomplete_or_malformed_file_is_refused(tmp_path, file, message):
    with pytest.raises(ValueError, match=message):
        scan_weights([file])
    (tmp_path / "x.safetensors").write_bytes(file)
    with pytest.raises(ValueError, match=rf"x\.safetensors: .*{message}"):
        read_weights(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("F4", [4], 2), ("F6_E3M2", [4], 3), ("F8_E4M3", [4], 4), ("C64", [2], 16), ("BOOL", [2], 2)],
)
def test_dtypes_that_numpy_lacks_have_their_size(dtype, shape, size):
    (found,) = scan_weights([header(place(0, size, dtype=dtype, shape=shape), size)]).tensors
    assert (found.dtype, list(found.shape), found.sha256) == (dtype, shape, sha256(bytes(size)))


def test_a_stored_file_is_compared_with_its_commit(tmp_path):
    data = safetensors(TENSORS)
    store = MemoryStore({"a": data, "b": data[:-1]})
    (tmp_path / "a").write_bytes(data)
    file = DataFile("a", len(data), sha256(data))
    assert read_stored_weights(store, file) == read_weights(tmp_path / "a")
    with pytest.raises(CorruptObjectError, match=r"b in memory://test: .* 1 bytes too early"):
        read_stored_weights(store, DataFile("b", len(data) - 1, sha256(data[:-1])))
    store.objects["a"] = safetensors(TENSORS | {"lm_head.weight": HEAD + 1})
    with pytest.raises(CorruptObjectError, match="a in memory://test: found SHA-256"):
        read_stored_weights(store, file)


def test_memory_is_bounded(tmp_path):
    """Reading a file of 200 MB needs only the memory of a few pieces."""
    path = tmp_path / "large.safetensors"
    path.write_bytes(safetensors({"a": np.zeros(50_000_000, np.float32)}))
    tracemalloc.start()
    found = read_weights(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.tensors[0].sha256 == sha256(bytes(200_000_000))
    assert peak < 64 << 20


def test_tensors_in_a_header_are_in_the_order_of_their_bytes():
    text = json.dumps(
        {
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        }
    )
    assert [(t.name, t.shape) for t in parse_header(text.encode())] == [("a", ()), ("b", (2,))]
