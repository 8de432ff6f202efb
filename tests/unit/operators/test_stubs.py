"""What mypy believes of Megatron-core, mbridge and vLLM is what is installed."""

import subprocess
import sys
import tomllib

import pytest
from setuptools import find_namespace_packages

from tests.paths import ROOT
from tests.unit.operators.stubs import STUBS

LIBRARIES = sorted(path.name for path in STUBS.iterdir())


@pytest.mark.integration  # it imports the real engines
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_of_the_stubs_is_in_the_library(library: str):
    """Modules, functions with their parameters, classes with their members."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.operators.stubs", library],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", f"the stubs have what {library} does not:\n{done.stdout}"


def test_no_stub_is_installed():
    """A wheel with them would shadow nothing, but mypy would find two of each."""
    assert LIBRARIES == ["mbridge", "megatron", "vllm"]
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    found = find_namespace_packages(str(ROOT), **tools["setuptools"]["packages"]["find"])
    assert "operators.rollout" in found
    assert [package for package in found if "stubs" in package] == []
