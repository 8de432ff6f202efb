"""Read and write traces in an environment with only pyarrow, numpy and boto3."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.traces_alone import NEEDED

pytestmark = pytest.mark.integration


def install(folder: Path) -> Path:
    """Create a virtual environment with the pinned versions and return its Python.

    Without a network, the test is skipped.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    pins = re.findall(
        rf"^({'|'.join(NEEDED)})==(\S+)", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE
    )
    assert {name for name, _ in pins} == set(NEEDED)
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", str(python)]
    done = subprocess.run(
        [*command, *(f"{name}=={version}" for name, version in pins)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode and "No solution found" not in done.stderr:
        pytest.skip(f"packages cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return python


def test_traces_need_only_pyarrow_numpy_and_boto3(tmp_path):
    python = install(tmp_path / "venv")
    done = subprocess.run(
        [python, "-P", ROOT / "tests/traces_alone.py", tmp_path / "store"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "store/steps/000000/manifest.json").is_file()
