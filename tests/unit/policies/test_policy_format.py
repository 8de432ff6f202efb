"""The example in docs/policy-format.md is exact; the page's reader reads our difference files."""

import re
import subprocess
import sys

import numpy as np
import pytest

from pipeline.policies import coding
from pipeline.policies.coding import apply, encode
from pipeline.policies.difference import METADATA, DifferenceWriter
from tests.paths import ROOT
from tests.weights import safetensors

PAGE = (ROOT / "docs/policy-format.md").read_text()
(READER,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(DUMP,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)

PROGRAM = """
import pathlib, sys
{reader}
root = pathlib.Path(sys.argv[1])
with safe_open(root / "former.safetensors", "np") as file:
    former = {{name: file.get_tensor(name).tobytes() for name in file.keys()}}
for name, tensor in read(former, root / "difference.safetensors").items():
    (root / (name + ".found")).write_bytes(tensor)
assert not [name for name in sys.modules if name.split(".")[0] in ("pipeline", "operators")]
if "small" in sys.argv:
    assert "pyarrow" not in sys.modules
"""


def row(name: str) -> np.ndarray:
    """Return a row of words from the page's table."""
    (cells,) = re.findall(rf"^\| {name} \| (.*) \|$", PAGE, re.MULTILINE)
    return np.array([int(cell.strip("* "), 16) for cell in cells.split("|")], "<u2")


def read_apart(tmp_path, former: dict[str, np.ndarray], new: dict[str, np.ndarray], word: str = ""):
    """Run the page's reader in a separate process, isolated from this project."""
    pytest.importorskip("safetensors")
    (tmp_path / "former.safetensors").write_bytes(safetensors(former))
    with (
        (tmp_path / "spool").open("w+b") as spool,
        (tmp_path / "difference.safetensors").open("wb") as file,
    ):
        writer = DifferenceWriter(spool)
        for name, array in former.items():
            if (coded := encode(array, new[name], array.itemsize)) is not None:
                writer.add(name, coded)
        writer.write_to(file)
    program = PROGRAM.format(reader=READER)
    command = [sys.executable, "-I", "-c", program, tmp_path, word]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name, array in new.items():
        assert (tmp_path / f"{name}.found").read_bytes() == array.tobytes()


def test_the_examples_numbers_and_words_match():
    (cells,) = re.findall(r"^\| former \| (.*) \|$", PAGE, re.MULTILINE)
    numbers = np.array([float(cell) for cell in cells.split("|")], np.float32)
    assert (numbers.view(np.uint32) == row("as words").astype(np.uint32) << 16).all()


def test_the_encoder_writes_the_examples_bytes():
    dumped = bytes.fromhex("".join(re.findall(r"^((?:[0-9a-f]{2} )+)", DUMP, re.MULTILINE)))
    assert encode(row("as words"), row("new words"), 2) == dumped
    target = row("as words")
    apply(dumped, target)
    assert (target == row("new words")).all()


def test_the_page_gives_the_block_size_and_metadata():
    assert f"**blocks** of {coding.BLOCK:,}" in PAGE
    assert f'`{{"format": "{METADATA["format"]}", "version": "{METADATA["version"]}"}}`' in PAGE


def test_the_pages_reader_reads_its_example(tmp_path):
    former, new = row("as words").view(np.float16), row("new words").view(np.float16)
    same = np.arange(3)
    read_apart(tmp_path, {"gate": former, "ids": same}, {"gate": new, "ids": same}, "small")


def test_the_pages_reader_reads_our_files(tmp_path):
    """Each tensor has two blocks. The cases cover all widths, compressed planes and plain ones."""
    rng = np.random.default_rng(0)
    former, new = {}, {}
    for dtype, share in [("u1", 1e-5), ("f2", 0.1), ("f2", 0.8), ("f4", 0.01), ("i8", 0.001)]:
        name, count = f"{dtype} {share}", coding.BLOCK + 77
        words = rng.integers(0, 1 << 16, count).astype(dtype.replace("f", "u").replace("i", "u"))
        steps = rng.integers(-300, 300, count).astype(words.dtype)
        changed = np.where(rng.random(count) < share, words + steps, words)
        former[name], new[name] = (array.view(dtype) for array in (words, changed))
    read_apart(tmp_path, former, new)
