"""Each part of Retrace imports only the packages that it needs; `pipeline` imports no engine."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from pipeline import extras
from pipeline.exits import CONFIGURATION_ERROR
from tests.paths import ROOT

EXTRAS = "prefect fastapi httpx transformers tensorboard psutil kubernetes prefect_kubernetes torch"


def run_without(packages: str, program: str) -> subprocess.CompletedProcess[str]:
    hide = f"import sys\nfor name in {packages.split()!r}: sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-c", hide + program],
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_every_module_of_pipeline_loads_no_engine():
    program = (
        "import importlib, pkgutil, sys, pipeline\n"
        "for module in pkgutil.walk_packages(pipeline.__path__, 'pipeline.'):\n"
        "    importlib.import_module(module.name)\n"
        "heavy = {'torch', 'vllm', 'megatron', 'mbridge', 'operators'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_settings_store_and_traces_need_no_extra():
    """Machines that only read traces have just the base installation, which must be enough for
    these packages."""
    program = (
        "import importlib, pkgutil\n"
        "for name in ('config', 'store', 'run', 'traces', 'rl', 'cli'):\n"
        "    package = importlib.import_module(f'pipeline.{name}')\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
    )
    done = run_without(EXTRAS, program)
    assert done.returncode == 0, done.stderr


def test_the_error_of_a_run_without_the_flow_extra_names_the_extra(tmp_path: Path):
    program = (
        "from pipeline.cli import main\n"
        "for command in ('run', 'check'):\n"
        f"    sys.argv[1:] = [command, 'examples/quickstart.yaml', 'store.uri={tmp_path}']\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 2, end\n"
    )
    done = run_without("prefect transformers", program)
    assert done.returncode == 0, done.stderr
    assert done.stderr == 2 * (
        "checking examples/quickstart.yaml\n"
        "error: this installation of retrace has no prefect, transformers, which a run needs: "
        "pip install 'retrace-moe[flow]'\n"
    )


def test_the_error_of_a_run_without_engines_names_the_extra(tmp_path: Path):
    """The error comes before anything starts. `check` succeeds, because the run may start on
    another machine."""
    program = (
        "from pipeline.cli import main\n"
        f"sys.argv[1:] = ['COMMAND', 'examples/quickstart.yaml', 'store.uri={tmp_path}']\n"
        "main()\n"
    )
    done = run_without("vllm", program.replace("COMMAND", "run"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: this installation of retrace has no vllm, which a rollout worker needs: "
        "pip install 'retrace-moe[rollout-cpu]' (on GPUs: 'retrace-moe[rollout-cuda]')"
    )
    done = run_without("vllm", program.replace("COMMAND", "check"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "program", "says"),
    [
        ("vllm", "rollout", "a rollout worker needs: pip install 'retrace-moe[rollout-cpu]'"),
        ("megatron", "training", "a training rank needs: pip install 'retrace-moe[training]'"),
    ],
)
def test_the_error_of_a_worker_without_its_extra_names_the_extra(
    package: str, program: str, says: str
):
    """The error is one line, and its exit code prevents a restart."""
    done = run_without(
        package,
        "import os, runpy\n"
        "os.environ['RANK'] = '0'\n"
        "sys.argv[1:] = ['--run-uri', 'none', '--attempt', '0', *WORKER]\n".replace(
            "WORKER", "['--worker', '0']" if program == "rollout" else "[]"
        )
        + f"runpy.run_module('operators.{program}', run_name='__main__')\n",
    )
    assert done.returncode == CONFIGURATION_ERROR, done.stderr
    [line] = done.stderr.splitlines()
    assert f"this installation of retrace has no {package}, which {says}" in line


@pytest.mark.parametrize(
    ("package", "module", "extra"),
    [
        ("kubernetes", "pipeline.launch.kubernetes.api", "[kubernetes]"),
        ("prefect_kubernetes", "pipeline.installation.register", "[kubernetes]"),
        ("tokenizers", "retrace.tokenizer", ""),
    ],
)
def test_the_error_of_a_missing_package_names_the_extra(package: str, module: str, extra: str):
    program = (
        "import importlib\n"
        "from pipeline.errors import InputError\n"
        "try:\n"
        f"    module = importlib.import_module({module!r})\n"
        "    module.StagedTokenizer.__dict__['_tokenizer'].func(None)\n"
        "except InputError as error:\n"
        "    print(error)\n"
    )
    done = run_without(package, program)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith(f"this installation of retrace has no {package}, which ")
    assert line.endswith(f"needs: pip install 'retrace-moe{extra}'")


NOT_PINNED = {"swanlab", "trackio"}
"""Extras that are not installed in the test environment: trackio requires an older pillow, and
swanlab requires many packages."""


def test_extras_are_those_of_the_distribution():
    """Each extra in pyproject.toml requires the packages whose import names are in EXTRAS."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    providers = packages_distributions()
    for extra, packages in extras.EXTRAS.items():
        if extra in NOT_PINNED:
            continue
        lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
        asked = {re.split(r"[=<>\[ ]", line)[0] for line in lines}
        for package in packages:
            assert asked & {name.replace("_", "-").lower() for name in providers[package]}, package


@pytest.mark.parametrize(
    "arguments", [["--help"], ["check", "quickstart.yaml"], ["run", "quickstart.yaml"]]
)
def test_the_first_line_is_printed_before_anything_heavy_is_imported(arguments: list[str]):
    """Users see immediately that the command works, although Prefect takes seconds to import."""
    program = (
        "import sys\n"
        "heavy = {'prefect', 'transformers', 'tokenizers', 'boto3', 'fastapi'}\n"
        "class FirstLine:\n"
        "    def __init__(self, stream):\n"
        "        self.stream = stream\n"
        "    def __getattr__(self, name):\n"
        "        return getattr(self.stream, name)\n"
        "    def write(self, text):\n"
        "        print(sorted(heavy & set(sys.modules)), file=sys.__stdout__, flush=True)\n"
        "        raise SystemExit(7)\n"
        "from pipeline.cli import main\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "sys.stdout, sys.stderr = FirstLine(sys.stdout), FirstLine(sys.stderr)\n"
        "main()\n"
    )
    done = run_without("", program)
    assert (done.returncode, done.stdout) == (7, "[]\n"), done.stderr


def test_the_doctor_accepts_a_pod_without_the_flows_packages_and_engines(tmp_path: Path):
    """A worker's pod has only the packages that its kind of worker needs."""
    program = (
        "from pipeline.doctor import checks\n"
        "checks._probe = lambda *words: {'version': '0', 'platform': 'cpu', 'routes': None}\n"
        "from pipeline.cli import main\n"
        f"sys.argv[1:] = ['doctor', {str(tmp_path)!r}]\n"
        "main()\n"
    )
    done = run_without(f"{EXTRAS} vllm", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-       all-reduce          torch is not installed" in done.stdout
