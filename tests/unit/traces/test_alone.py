"""Traces work if all packages but pyarrow, numpy, msgspec, boto3 and what they need are hidden."""

import json
import os
import subprocess
import sys

from tests.paths import ROOT
from tests.traces_alone import closure


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", ROOT / "tests/traces_alone.py", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_traces_need_only_pyarrow_numpy_msgspec_and_boto3(tmp_path):
    done = run(tmp_path / "store", "--hide")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "store/steps/000000/manifest.json").is_file()


def test_the_program_notices_other_packages(tmp_path):
    """If it did not, the test above would prove nothing."""
    done = run(tmp_path / "store")
    assert "expected an environment without it" in done.stderr
    assert done.returncode == 1


def test_the_requirements_of_boto3_are_not_hidden():
    found = set(closure(["boto3"]))
    assert {"boto3", "botocore", "urllib3", "python-dateutil"} <= found
    assert not found & {"pydantic", "pyyaml", "awscrt"}


def test_the_library_imports_only_what_traces_need(tmp_path):
    """Traces can therefore be used on machines where Retrace does not run."""
    program = (
        "import json, sys\n"
        "before = set(sys.modules)\n"
        "import pipeline.traces, pipeline.upkeep.export, pipeline.upkeep.verify\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(json.dumps(sorted(new - set(sys.stdlib_module_names) - {'pipeline'})))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    needed = {"numpy", "pyarrow", "msgspec", "cython_runtime", "cloudpickle"}
    needed.add("typing_extensions")  # msgspec uses it if it is installed
    extra = set(json.loads(done.stdout)) - needed
    assert {name for name in extra if not name.startswith("_")} == set()
