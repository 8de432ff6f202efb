"""bash evaluates a verl script without starting or writing anything that the script names."""

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeline.config.imports import script
from pipeline.config.imports.script import TrainerCommand, read_script, unknown_part
from pipeline.errors import InputError
from tests.patience import PATIENCE_S, eventually

TRAINER = "python3 -m verl.trainer.main_ppo"


def read(folder, text, **variables) -> TrainerCommand:
    path = folder / "run.sh"
    path.write_text(text)
    return read_script(path, variables)


def problem(folder, text, **variables) -> str:
    with pytest.raises(InputError) as caught:
        read(folder, text, **variables)
    return str(caught.value).replace(str(folder), "")


def test_constructs_of_verls_scripts_are_evaluated(tmp_path):
    command = read(
        tmp_path,
        f"""#!/usr/bin/env bash
set -xeuo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
ulimit -n 65535
SCRIPT_DIR=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
DEVICE=${{DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}}
case "$DEVICE" in gpu) TP=${{TP:-2}} ;; npu) TP=8 ;; esac
prompt=512; response=$((prompt * 4))
[ "$TP" -gt 1 ] && sequence=True || sequence=False
DATA=(
    data.max_prompt_length=$prompt  # tokens
    data.max_response_length=${{response}}
    data.train_files="['a b.parquet','c.parquet']"
)
DATA+=(trainer.nnodes=${{NNODES:-1}})
if [ "${{QUANTIZE:-}}" = fp8 ]; then DATA+=(rollout.quantization=fp8); fi
mkdir -p logs
exec {TRAINER} --config-name=ppo_megatron_trainer \\
    "${{DATA[@]}}" tp=$TP \\
    sequence=$sequence "$@" > logs/train.log 2>&1 | tee logs/$DEVICE.log
""",
        NNODES="4",
    )
    assert command.arguments == (
        "--config-name=ppo_megatron_trainer",
        "data.max_prompt_length=512",
        "data.max_response_length=2048",
        "data.train_files=['a b.parquet','c.parquet']",
        "trainer.nnodes=4",
        "tp=2",
        "sequence=True",
    )
    assert "line 17: `mkdir` was not run" in command.notes


def test_parts_of_a_pipe_are_separated(tmp_path):
    """The parts run at the same time, so their recorded words are interleaved."""
    for _ in range(20):
        command = read(tmp_path, f"{TRAINER} a=1 b=2 c=3 | tee x y z | tee u v w\n")
        assert command.arguments == ("a=1", "b=2", "c=3")


@pytest.mark.parametrize(
    "launcher",
    ["python", "nohup python3 -u", "ray job submit --no-wait -- python3", "uv run python"],
)
def test_the_trainer_is_found_behind_another_command(tmp_path, launcher):
    text = f"{launcher} -m verl.trainer.main_ppo a=1 &\nwait\n"
    assert read(tmp_path, text).arguments == ("a=1",)


def test_the_trainer_of_the_dapo_recipe_is_found(tmp_path):
    text = "ray job submit --no-wait -- python3 -m recipe.dapo.main_dapo a=1\n"
    assert read(tmp_path, text).arguments == ("a=1",)


def test_nothing_is_started_or_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = """touch by-name
echo text > redirected
echo text > "quoted one"
/usr/bin/touch by-path
. ./other.sh
PATH=/usr/bin:/bin
touch by-new-path
python3 -m verl.trainer.main_ppo a=1
"""
    (tmp_path / "other.sh").write_text("python3 -m verl.trainer.main_ppo sourced=1")
    found = problem(tmp_path, text, PATH="/usr/bin:/bin", BASH_ENV=str(tmp_path / "other.sh"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.sh", "run.sh"]
    assert "line 4: /usr/bin/touch: restricted" in found
    assert "line 5: .: ./other.sh: restricted" in found
    assert "line 6: PATH: readonly variable" in found


def test_the_line_that_makes_a_value_unknown_is_named(tmp_path):
    command = read(tmp_path, f"GPUS=$(nproc)\n{TRAINER} a=$GPUS b=run-$(date +%m)\n")
    first, second = command.arguments
    assert (
        unknown_part(first)
        == "line 1 of the script takes this value from `nproc`, which was not run"
    )
    assert "line 2 of the script takes this value from `date`" in (unknown_part(second) or "")
    assert unknown_part("a=1") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"set -u\n\n{TRAINER} a=$HDFS_ROOT\n",
            "/run.sh, line 3: HDFS_ROOT: unbound variable; set it before the command: "
            "HDFS_ROOT=... retrace import-verl ...",
        ),
        (
            f"{TRAINER} a=$(( $(nproc) / 2 ))\n",
            "no program is run, and no file is written or sourced; write the value itself",
        ),
        (f"for x in 1 2; do {TRAINER} a=$x; done\n", "lines 1, 1 each start"),
        (
            "python3 -m verl.trainer.sft_trainer a=1\n",
            "/run.sh: the script starts verl.trainer.sft_trainer, expected python3 -m "
            "verl.trainer.main_ppo; other trainers cannot be imported",
        ),
        ("echo hello\n", "/run.sh: the script starts no module"),
        (f"if true; then\n{TRAINER}\n", "syntax error"),
    ],
)
def test_errors_name_the_line(tmp_path, text, message):
    assert message in problem(tmp_path, text)


def test_a_script_that_waits_for_a_program_is_ended(tmp_path, monkeypatch):
    """None of the script's processes survives, not even those of subshells."""
    monkeypatch.setattr(script, "_LONGEST_S", 1.0)
    text = f"(until ray status; do :; done) & wait\n{TRAINER}\n"
    assert "does not end on its own" in problem(tmp_path, text, MARK=str(tmp_path))
    eventually(lambda: not left_of(tmp_path), lambda: left_of(tmp_path))


def left_of(mark: Path) -> list[psutil.Process]:
    """Return the processes with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MARK") == str(mark):
                found.append(process)
    return found


def test_a_script_that_ends_its_process_group_is_read(tmp_path):
    """Scripts that start background processes often end their process group. Here, a separate
    process reads the script, because the script may end the process that reads it."""
    path = tmp_path / "run.sh"
    path.write_text(f"trap 'kill 0' EXIT\n{TRAINER} a=1\n")
    reading = (
        "import pathlib, sys\n"
        "from pipeline.config.imports.script import read_script\n"
        "print(read_script(pathlib.Path(sys.argv[1]), {}).arguments)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", reading, str(path)],
        capture_output=True, text=True, start_new_session=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "('a=1',)\n"), done.stderr
