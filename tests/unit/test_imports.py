"""`pipeline` stays light: looking at traces, or driving a run, needs no engine."""

import subprocess
import sys

import pytest

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
    """The base installation: what workers and readers of traces have."""
    program = (
        "import importlib, pkgutil\n"
        "for name in ('config', 'store', 'run', 'traces', 'rl', 'cli'):\n"
        "    package = importlib.import_module(f'pipeline.{name}')\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
    )
    done = run_without(EXTRAS, program)
    assert done.returncode == 0, done.stderr


def test_a_run_without_the_flow_extra_says_what_to_install():
    program = (
        "from pipeline.cli import main\n"
        "for command in ('run', 'check'):\n"
        "    sys.argv[1:] = [command, 'examples/quickstart.yaml']\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 2, end\n"
    )
    done = run_without("prefect transformers", program)
    assert done.returncode == 0, done.stderr
    assert done.stderr == 2 * (
        "checking examples/quickstart.yaml\n"
        "error: this installation of retrace has no prefect, transformers, which `retrace run` "
        "and `retrace check` need; install the extra: pip install 'retrace-moe[flow]'\n"
    )


@pytest.mark.parametrize(
    "arguments", [["--help"], ["check", "quickstart.yaml"], ["run", "quickstart.yaml"]]
)
def test_the_first_line_is_printed_before_anything_heavy_is_imported(arguments: list[str]):
    """Users see at once that something happens: Prefect and tokenizers take seconds."""
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
