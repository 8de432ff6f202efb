"""scripts/gpu_peak.py also runs its step on the CPU; its measurement needs a GPU."""

import re
import subprocess
import sys

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.integration

PROGRAM = """
import torch
from scripts import gpu_peak

gpu_peak.choose_device = lambda name: "cuda"
gpu_peak.SAMPLES, gpu_peak.LENGTH, gpu_peak.WIDTHS = 2, 64, {"num_hidden_layers": 2}
torch.cuda.max_memory_allocated = lambda: PEAK
raise SystemExit(gpu_peak.main())
"""


@pytest.mark.parametrize(("peak", "code"), [(6_000_000, 0), (10_000_000_000, 1)])
def test_a_step_runs_and_its_peak_is_compared(peak: int, code: int):
    """The estimate for this model is 7 MB. A peak of 6 MB is accepted, and one of 10 GB is not."""
    program = PROGRAM.replace("PEAK", str(peak))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert re.search(rf"peak {peak / 1e9:.2f} GB, estimate 0.01 GB", done.stdout), done.stderr
    assert done.returncode == code, done.stdout
    assert ("**missed**" in done.stdout) == bool(code)
