"""Any safetensors reader can open a difference file; our reader refuses files of other kinds."""

import io
import json

import numpy as np
import pytest

from pipeline.policies.coding import apply, encode
from pipeline.policies.difference import (
    METADATA,
    DifferenceError,
    DifferenceWriter,
    check_fits,
    read_difference,
)
from pipeline.policies.weights import scan_weights

OLD = np.arange(40, dtype=np.uint16)
CODED = {"gate.weight": encode(OLD, OLD ^ 1, 2), "bias é": encode(OLD[:4], OLD[:4] + 1, 2)}


def written(coded: dict[str, bytes]) -> bytes:
    writer = DifferenceWriter(io.BytesIO())
    for name, data in coded.items():
        writer.add(name, data)
    assert len(writer) == len(coded)
    assert writer.coded_bytes == sum(map(len, coded.values()))
    file = io.BytesIO()
    writer.write_to(file)
    assert file.getvalue() == b"".join(writer.pieces())
    return file.getvalue()


def forged(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_a_written_file_is_read():
    data = written(CODED)
    assert {name: bytes(coded) for name, coded in read_difference(data).items()} == CODED
    assert [tensor.name for tensor in scan_weights([data]).tensors] == list(CODED)
    target = bytearray(OLD.tobytes())
    apply(read_difference(memoryview(data))["gate.weight"], target)
    assert target == (OLD ^ 1).tobytes()


def test_other_readers_open_the_file(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "difference.safetensors"
    path.write_bytes(written(CODED))
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == METADATA
        names = set(file.keys())
        assert {name: file.get_tensor(name).tobytes() for name in names} == CODED


def entry(dtype: str, *shape: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (written(CODED)[:-1], "as in the header"),
        (written(CODED) + b"\0", "as in the header"),
        (written(CODED)[:20], "header"),
        (forged([]), "header"),
        (forged({}), "metadata None"),
        (forged({"__metadata__": METADATA | {"version": "2"}}), "'version': '2'"),
        (forged({"__metadata__": METADATA, "a": entry("BF16", 1)}, b"12"), "tensor a as BF16"),
        (forged({"__metadata__": METADATA, "a": entry("U8", 2, 1)}, b"12"), r"\(2, 1\)"),
    ],
)
def test_an_inconsistent_file_is_refused(data: bytes, message: str):
    with pytest.raises(DifferenceError, match=message):
        read_difference(data)


def test_a_difference_is_checked_against_its_base():
    check_fits(CODED, {"gate.weight": 80, "bias é": 8, "untouched": 5})
    with pytest.raises(DifferenceError, match="which its base lacks"):
        check_fits(CODED, {"bias é": 8})
    with pytest.raises(DifferenceError, match=r"gate\.weight, expected 82 bytes"):
        check_fits(CODED, {"gate.weight": 82, "bias é": 8})
