"""`retrace check`: exit code 0 with one line, or 2 with every error; it starts nothing, and loads
no deep-learning library."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny
from tests.unit.inputs import write_inputs

COMMAND = """
import sys
from pipeline.cli import main
try:
    main()
finally:
    heavy = {"torch", "vllm", "megatron", "prefect"} & set(sys.modules)
    if heavy:
        sys.exit(f"loaded {heavy}")
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    return write_inputs(folder, make_tiny(folder / "model", "qwen3_moe"))


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "check", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_right_input(settings):
    done = check(str(settings), "trainer.project_name=x", 'trainer.experiment_name="fine"')
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "note: trainer.project_name: ignored; the run's name is experiment_name",
        f"{settings} is right: 10 prompts, 4 MoE layers, top-4 of 16 experts, routing replay "
        f"disabled, run file://{settings.parent}/store/fine",
    ]
    assert not (settings.parent / "store/fine").exists()


def test_wrong_settings(settings):
    done = check(str(settings), "trainer.nnode=2", "trainer.seed=x")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: trainer.seed: found 'x' (text), expected an integer >= 0; the default is 1",
        "error: trainer.nnode: unknown key; did you mean trainer.nnodes?",
        "further checks were not made: correct these first",
    ]


def test_wrong_files(settings):
    done = check(str(settings), "data.train_files=[a.parquet]", "launch.rollout_workers=0")
    assert done.returncode == 2
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()] == [
        "launch.rollout_workers",
        "data.train_files",
    ]
