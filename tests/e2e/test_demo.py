"""The script of `make kind-demo`, on any cluster that already holds the images."""

import os
import subprocess

from tests.e2e.installation import ROOT, Installation
from tests.e2e.prefect_api import SINGLE, SMALL


def test_the_demo_trains_and_shows_traces(installed: Installation):
    """The demo upgrades the installation, starts a run, waits for its end and lists its traces."""
    done = subprocess.run(
        [ROOT / "scripts/kind/demo.sh", "demo", *SMALL, *SINGLE, "trainer.total_training_steps=1"],
        env={**os.environ, "NAMESPACE": installed.namespace.name},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "Completed" in printed
    assert "artifact" not in printed, printed
    assert "s3://retrace/runs/demo" in printed, printed
    assert "all good; checked: 1 sealed steps, 32 samples" in printed, printed
    assert "Log in at http://127.0.0.1:4200 with: admin:" in printed
