"""The stubs of Megatron-core, mbridge and vLLM match the installed libraries."""

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
def test_the_library_has_every_name_in_the_stubs(library: str):
    """Names are modules, functions with their parameters, and classes with their members."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.operators.stubs", library],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", f"the stubs have names that {library} lacks:\n{done.stdout}"


def test_no_stub_is_installed():
    """Stubs in a wheel would not shadow modules, but mypy would find each stub twice."""
    assert LIBRARIES == ["mbridge", "megatron", "vllm"]
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    found = find_namespace_packages(str(ROOT), **tools["setuptools"]["packages"]["find"])
    assert "operators.rollout" in found
    assert [package for package in found if "stubs" in package] == []
