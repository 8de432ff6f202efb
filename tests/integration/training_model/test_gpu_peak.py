"""scripts/gpu_peak.py takes its step on the CPU too; what it measures is left to a GPU."""

import re
import subprocess
import sys

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.integration

PROGRAM = """
import torch
from scripts import gpu_peak

gpu_peak.choose_device = lambda wanted: "cuda"
gpu_peak.SAMPLES, gpu_peak.LENGTH, gpu_peak.WIDTHS = 2, 64, {"num_hidden_layers": 2}
torch.cuda.max_memory_allocated = lambda: PEAK
raise SystemExit(gpu_peak.main())
"""


@pytest.mark.parametrize(("peak", "code"), [(6_000_000, 0), (10_000_000_000, 1)])
def test_a_step_is_taken_and_compared(peak: int, code: int):
    """The estimate of this model is 7 MB, so 6 MB are as estimated and 10 GB are not."""
    program = PROGRAM.replace("PEAK", str(peak))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert re.search(rf"peak {peak / 1e9:.2f} GB, estimate 0.01 GB", done.stdout), done.stderr
    assert done.returncode == code, done.stdout
    assert ("**missed**" in done.stdout) == bool(code)
