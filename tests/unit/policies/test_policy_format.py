"""The stored form of a coded tensor: fixed bytes, and the constants in docs/trace-format.md."""

import numpy as np

from pipeline.policies import coding
from pipeline.policies.coding import apply, encode
from pipeline.policies.difference import METADATA
from tests.paths import ROOT

PAGE = (ROOT / "docs/trace-format.md").read_text()
FORMER = np.array([0x3F80, 0xC000, 0x3F00, 0x0000, 0x3E80, 0x4040, 0xBFC0, 0x3E00], "<u2")
"""The bf16 numbers 1, -2, 0.5, 0, 0.25, 3, -1.5 and 0.125."""
CHANGES = {1: 0xC001, 3: 0x8000, 6: 0xBFBF}
"""New words by position: steps of 1, -32,768 (to -0.0) and -1, after gaps of 1, 1 and 2 words."""
CODED = bytes.fromhex(
    "02 08 00 00 00 00 00 00 00"  # words of two bytes; eight words
    "03 00 00 00 01 02"  # block 0 lists three words; one plane of gaps, two of steps
    "03 00 00 00 03 00 00 00 03 00 00 00"  # three bytes for three words: not compressed
    "01 01 02"  # gaps
    "02 ff 01 00 ff 00"  # folded steps 0002, ffff, 0001: their lower, then their upper bytes
)


def test_a_coded_tensor_has_these_bytes():
    new = FORMER.copy()
    new[list(CHANGES)] = list(CHANGES.values())
    assert encode(FORMER, new, 2) == CODED
    target = FORMER.copy()
    apply(CODED, target)
    assert (target == new).all()


def test_the_page_gives_the_block_size_and_metadata():
    assert f"**blocks** of {coding.BLOCK:,}" in PAGE
    assert f'`{{"format": "{METADATA["format"]}", "version": "{METADATA["version"]}"}}`' in PAGE
