"""`retrace check` exits with 0 and a summary, or with 2 and all errors. It starts nothing and loads
no deep-learning library."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny
from tests.unit.inputs.small_inputs import write_inputs

COMMANDS = """
import contextlib, io, json, sys
from pipeline.cli import main
found = []
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = ["check", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    found.append((code, said.getvalue()))
heavy = {"torch", "vllm", "megatron", "prefect"} & set(sys.modules)
if heavy:
    sys.exit(f"loaded {heavy}")
print(json.dumps(found))
"""
CASES = {
    "right": ("trainer.default_hdfs_dir=x", 'trainer.experiment_name="fine"'),
    "too large": ("trainer.n_gpus_per_node=100000", "actor_rollout_ref.rollout.n=100000"),
    "GPUs too small": ("--gpu-memory", "1GB", "trainer.default_hdfs_dir=x"),
    "GPUs large enough": ("--gpu-memory", "80GiB", "trainer.default_hdfs_dir=x"),
    **{
        f"only config.json, {size}": (
            *("--gpu-memory", size, "actor_rollout_ref.model.path=CONFIG"),
            "data.train_files=[a.parquet]",
        )
        for size in ("1GB", "80GiB")
    },
    "wrong settings": ("trainer.nnode=2", "trainer.seed=x"),
    "wrong files": (
        "trainer.default_hdfs_dir=x",
        "data.train_files=[a.parquet]",
        "launch.rollout_workers=0",
    ),
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    return write_inputs(folder, make_tiny(folder / "model", "qwen3_moe"))


@pytest.fixture(scope="module")
def done(settings) -> dict[str, tuple[int, list[str]]]:
    """The exit code and the stderr lines of each case. One process runs all cases, because
    starting one is slow."""
    only = settings.parent / "only"
    only.mkdir()
    shutil.copy(settings.parent / "model/config.json", only)
    commands = json.dumps(
        [
            [str(settings), *(word.replace("CONFIG", str(only)) for word in overrides)]
            for overrides in CASES.values()
        ]
    )
    ended = subprocess.run(
        [sys.executable, "-c", COMMANDS, commands], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    for _, said in found:
        assert said.startswith(f"checking {settings}\n")
    return {
        case: (code, said.splitlines()[1:]) for case, (code, said) in zip(CASES, found, strict=True)
    }


def test_valid_input_gives_a_summary(settings, done):
    """The lines describe the run's work and where it writes."""
    code, (note, right, *lines) = done["right"]
    store = f"file://{settings.parent}/store/fine"
    assert code == 0
    assert note == "note: trainer.default_hdfs_dir: not taken over; Retrace has no such setting"
    assert right == (
        f"{settings} is valid: 10 prompts, 4 MoE layers, top-4 of 16 experts, routing replay "
        f"disabled, run {store}"
    )
    told = dict(line.strip().split(maxsplit=1) for line in lines)
    assert " cores, " in told.pop("machine")
    assert told.pop("writes").startswith(
        "per step, a policy of 1.1 MB and samples of up to 43.9 kB; every"
    )
    assert told.pop("memory").startswith("about ")
    assert told.pop("host").endswith("on each training node, for a checkpoint")
    assert told.pop("engine").startswith("at least 1.1 MiB in each process of an engine: weights")
    assert told.pop("copies") == "the rollout workers on a machine keep 1.1 MB under TMPDIR"
    assert told == {
        "steps": "2 of 4 prompts x 2 = 8 samples",
        "updates": "1 per step, each of 4 prompts",
        "training": "1 rank: TP1 PP1 EP1, data-parallel 1, bfloat16",
        "rollout": "1 worker of TP1, bfloat16",
        "store": store,
        "logs": "outputs/fine/logs",
    }
    assert not (settings.parent / "store/fine").exists()


def test_a_run_too_large_for_this_machine_gives_a_warning(settings, done):
    """The settings are valid, but not for this machine. The first line reports this, and a warning
    gives the reason."""
    code, lines = done["too large"]
    assert code == 0
    assert lines[0].startswith(f"{settings} is valid, but not for this machine: 10 prompts, ")
    assert "warning: trainer.n_gpus_per_node: found 100000 training ranks, but" in lines[-2]
    assert lines[-1] == "`retrace run` refuses it on this machine"


def test_a_run_is_refused_if_the_gpus_are_too_small(settings, done):
    """The run is refused as if its input were invalid; no line calls the settings valid."""
    code, lines = done["GPUs too small"]
    assert code == 2
    note, error, gpus, *_ = lines
    assert gpus.split() == ["GPUs", "2:", "1", "for", "training,", "1", "for", "rollout"]
    assert note.startswith("note: trainer.default_hdfs_dir: not taken over")
    assert error.startswith("error: trainer: the fullest GPU needs about 4.0 GiB, but has")
    assert error.endswith(
        "no layout fits, because CUDA, NCCL and fragments are assumed to need 4.0 GiB; use larger "
        "GPUs"
    )


def test_a_run_is_accepted_if_the_gpus_are_large_enough(done):
    """With --gpu-memory, the estimate is for GPUs, even on a machine without one."""
    code, lines = done["GPUs large enough"]
    assert code == 0
    [memory] = [line for line in lines if line.strip().startswith("memory")]
    assert "on the fullest training GPU: " in memory
    assert "CUDA, NCCL, fragments 4.0 GiB" in memory


@pytest.mark.parametrize("size", ["1GB", "80GiB"])
def test_the_verdict_on_gpus_needs_only_config_json(done, size):
    """Other problems, such as absent weights and prompts, do not hide the verdict."""
    code, lines = done[f"only config.json, {size}"]
    assert code == 2
    errors = [line for line in lines if line.startswith("error: ")]
    assert any("has no model.safetensors" in error for error in errors)
    assert any("data.train_files" in error for error in errors)
    assert any("the fullest GPU needs" in error for error in errors) == (size == "1GB")
    [memory] = [line for line in lines if line.strip().startswith("memory")]
    assert "on the fullest training GPU: " in memory


def test_invalid_settings_are_refused(done):
    assert done["wrong settings"] == (
        2,
        [
            "error: trainer.seed: found 'x' (text), expected an integer >= 0; the default is 1",
            "error: trainer.nnode: unknown key; did you mean trainer.nnodes?",
            "checks that depend on invalid settings were skipped: correct these first",
        ],
    )


def test_invalid_files_are_refused(done):
    code, lines = done["wrong files"]
    assert code == 2
    assert lines[0].startswith("note: trainer.default_hdfs_dir: not taken over")
    assert [line.split(":")[1].strip() for line in lines] == [
        "trainer.default_hdfs_dir",
        "launch.rollout_workers",
        "data.train_files",
    ]
