"""`retrace doctor` on the machine of these tests, with nothing replaced."""

import subprocess
import sys

import pytest

from pipeline.hardware import gpu_pool
from tests.paths import ROOT

pytestmark = pytest.mark.integration


def test_this_machine_can_train_the_quickstart(tmp_path):
    """The probes use the real libraries: torch, torchrun and vLLM."""
    program = "from pipeline.cli import main; main()"
    settings = (ROOT / "examples/quickstart.yaml").read_text() + f"store: {{uri: {tmp_path}}}\n"
    (tmp_path / "my.yaml").write_text(settings)
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", str(tmp_path / "my.yaml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = dict(line.split(None, 2)[1::-1] for line in done.stdout.splitlines())
    assert set(lines.values()) == {"ok"}, done.stdout + done.stderr
    assert done.returncode == 0
    backend = "nccl" if gpu_pool() else "gloo"
    assert f"ranks, {backend}, " in done.stdout
    assert "returns routes" in done.stdout
