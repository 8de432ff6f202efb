"""Run the unchanged code blocks of docs/library.md that check, start and open a run."""

import re

import pytest

from tests.library_page import blocks, run_apart
from tests.paths import ROOT

pytestmark = pytest.mark.integration


def test_a_run_in_python_prints_the_described_output(tmp_path):
    """Train 2 steps of the example with real engines; the output matches the page's description."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = run_apart(blocks(needs_engines=True), tmp_path, timeout_s=800)
    assert done.returncode == 0, done.stderr[-8000:]
    lines = done.stdout.splitlines()
    assert lines[0] == f"3072 prompts; file://{tmp_path}/outputs/store/tour"
    assert lines[1].startswith("trainer.seed: found -1")
    assert lines[2] == "trainer.nnode: unknown key; did you mean trainer.nnodes?"
    metrics, *validations, sample = lines[-5:]
    assert metrics.startswith("[{'step': 0, 'critic/rewards/mean': 0.")
    for version, line in enumerate(validations):
        assert re.fullmatch(rf"{version} 0\.\d+ 512", line)
    assert re.fullmatch(r"000001/\d+/7 '<\|im_start\|>user\\n.* [01]\.0", sample)
