"""bash evaluates a verl script without starting or writing anything that the script names."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeline.config.imports import bash
from pipeline.config.imports.script import TrainerCommand, read_script, unknown_part, written_value
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
command -p touch by-command
env touch by-env
exec > >(tee by-substitution) 2>&1
cat > by-cat <<END
text
END
bash -c "touch by-bash"
git init by-git
(cd /tmp && touch by-cd)
python3 -m verl.trainer.main_ppo a=$OTHER
"""
    (tmp_path / "other.sh").write_text("OTHER=1\ntouch by-source\necho text > by-source\n")
    (tmp_path / "env.sh").write_text("touch by-env")
    variables = {"PATH": "/usr/bin:/bin", "BASH_ENV": str(tmp_path / "env.sh")}
    found = problem(tmp_path, text, **variables)
    assert re.findall(r"line \d+: [^;]*", found) == ["line 8: command: -p: restricted"]
    command = read(tmp_path, text.replace("command -p ", ""), **variables)
    assert command.arguments == ("a=1",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env.sh", "other.sh", "run.sh"]
    assert {re.findall("`(.*)`", note)[0] for note in command.notes[1:]} == {
        "touch", "/usr/bin/touch", "env", "bash", "git",
    }  # fmt: skip


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
            "no program is run, and no file is written; write the value itself",
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
    monkeypatch.setattr(bash, "_LONGEST_S", 1.0)
    text = f"(while :; do :; done) & wait\n{TRAINER}\n"
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


PLACES = """\
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
TOP=$(cd "$HERE/.." && pwd)
NAME=$(basename "$0" .sh)
REAL=$(dirname "$(readlink -f "$0")")
pushd "$TOP" > /dev/null
PUSHED=$PWD
popd > /dev/null
GIT=$(git rev-parse --show-toplevel 2>/dev/null || pwd)
cd "$TOP"
python3 -m verl.trainer.main_ppo "$HERE" "$TOP" "$NAME" "$REAL" "$PUSHED" "$GIT" "$PWD" "$OLDPWD" \\
    "$(realpath data/../x)" "${BASH_SOURCE%/*}" "$(cd -P jobs; pwd)"
"""


@pytest.mark.parametrize(
    ("start", "given"), [("repo", "jobs/run.sh"), ("", "repo/jobs/run.sh"), ("repo/jobs", "run.sh")]
)
def test_places_are_those_of_bash(tmp_path, monkeypatch, start, given):
    """bash itself runs the same script, with a program that prints its arguments."""
    jobs = tmp_path / "repo/jobs"
    jobs.mkdir(parents=True)
    (tmp_path / "repo/.git").mkdir()
    (tmp_path / "repo/data").mkdir()
    (jobs / "run.sh").write_text(PLACES)
    monkeypatch.chdir(tmp_path / start)
    printing = tmp_path / "bin/python3"
    printing.parent.mkdir()
    printing.write_text('#!/bin/sh\nshift 2\nprintf "%s\\n" "$@"\n')
    printing.chmod(0o755)
    git = tmp_path / "bin/git"
    git.write_text(f"#!/bin/sh\necho {tmp_path}/repo\n" if start else "#!/bin/sh\nexit 1\n")
    git.chmod(0o755)
    done = subprocess.run(
        ["bash", given], env={"PATH": f"{printing.parent}:/usr/bin:/bin"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    command = read_script(Path(given), {})
    assert list(command.arguments) == done.stdout.splitlines()
    assert command.folder == tmp_path / "repo"
    assert str(Path.cwd()) in command.notes[0]


def test_tests_of_files_look_in_the_folder_of_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "proj/data").mkdir(parents=True)
    (tmp_path / "proj/.env").write_text("SECRET_URL=http://x\n")
    text = f"""cd proj
NONE=
if [ -f .env ]; then set -a; source .env; set +a; fi
[[ -d data && ! -e none ]] && DATA=yes
[ -d "$NONE" ] && EMPTY=yes
{TRAINER} data=$DATA empty="${{EMPTY-no}}"
"""
    command = read(tmp_path, text)
    assert command.arguments == ("data=yes", "empty=no")
    assert command.environment["SECRET_URL"] == "http://x"


@pytest.mark.parametrize(
    "text",
    [
        "srun --nodes=2 bash -c '{trainer} a=1 b=$B'",
        'bash -lc "source ~/.bashrc && {trainer} a=1 b=$B"',
        'ssh host "cd /x && {trainer} a=1 b=$B"',
        'docker exec -e A=1 trainer bash -c "{trainer} a=1 b=$B"',
        "ray job submit -- bash -c '{trainer} a=1 b=$B'",
        "torchrun --nproc 8 -m verl.trainer.main_ppo a=1 b=$B",
        "/opt/conda/bin/python3 -u -m verl.trainer.main_ppo a=1 b=$B",
        "srun bash <<END\n{trainer} a=1 b=$B\nEND",
        "cat > job.sh <<'END'\n{trainer} a=1 b=$B\nEND\nsbatch job.sh",
        "COMMAND=$(cat <<END\n{trainer} a=1 b=$B\nEND\n)\neval $COMMAND",
        "bash inner.sh b=$B",
        "./inner.sh b=$B",
        'logger "starting verl.trainer.main_ppo"\n{trainer} a=1 b=$B',
        "exec {trainer} a=1 b=$B\n{trainer} never=1",
        "if [ $B = x ]; then {trainer} a=1 b=x; else {trainer} never=1; fi",
    ],
)
def test_the_trainer_is_found_in_quotes_and_in_other_scripts(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner.sh").write_text(f'{TRAINER} a=1 "$@"\n')
    command = read(tmp_path, f"export B=x\n{text.format(trainer=TRAINER)}\n")
    assert command.arguments == ("a=1", "b=x")


@pytest.mark.parametrize(
    "loop",
    [
        "while ! ray status; do sleep 5; done",
        "until ray status | grep -q ready; do\n  echo waiting\n  sleep 5\ndone",
        "while true; do\n  if ray status; then break; fi\n  sleep 5\ndone",
        "wait_for_ray() {\n  until ray status; do :; done\n}\nwait_for_ray",
        'while [ "$(ray status | grep -c node)" -lt 8 ]; do sleep 5; done',
        'until [ "$(ray status | grep -c node)" -ge 8 ]; do sleep 5; done',
        "while true; do\n  n=$(ray list nodes | wc -l)\n  if [ $n -ge 2 ]; then break; fi\n"
        "  sleep 5\ndone",
        "until [ -f /nowhere/ready ]; do\n  sleep 1\ndone",
        "(until ray status; do sleep 1; done) & wait",
    ],
)
def test_a_loop_that_waits_ends(tmp_path, monkeypatch, loop):
    monkeypatch.setattr(bash, "_WAITS", 5)
    assert read(tmp_path, f"set -eu\n{loop}\n{TRAINER} a=1\n").arguments == ("a=1",)


def test_a_script_that_ends_early_shows_its_line_and_its_words(tmp_path):
    check = (
        'if [[ ! -f "$MODEL/config.json" ]]; then\n  echo "no model at $MODEL" >&2\n  exit 3\nfi'
    )
    found = problem(tmp_path, f"set -euo pipefail\nMODEL=/nowhere\n{check}\n{TRAINER} a=1\n")
    assert "/run.sh, line 5: the script exits here with code 3" in found
    assert "'no model at /nowhere'" in found
    found = problem(tmp_path, f": ${{MODEL:?give MODEL}}\n{TRAINER} a=1\n")
    assert "line 1: MODEL: give MODEL; set it before the command: MODEL=..." in found
    found = problem(tmp_path, f'if [ "$(hostname)" = "$MASTER" ]; then\n{TRAINER} a=1\nfi\n')
    assert "does not reach line 2" in found
    assert "`hostname`" in found


def test_values_from_variables_that_are_not_set_are_unknown(tmp_path):
    text = f"""[ -z "$NODES" ] && NODES=1
{TRAINER} $EXTRA model=$MODEL train="['$DATA/a','$OTHER/b']" nodes=$NODES lr=${{LR:-1e-6}} \
    text='$TEXT'
"""
    arguments = read(tmp_path, text).arguments
    assert [written_value(argument) for argument in arguments] == [
        "model=$MODEL", "train=['$DATA/a','$OTHER/b']", "nodes=1", "lr=1e-6", "text=$TEXT",
    ]  # fmt: skip
    reasons = [unknown_part(argument) for argument in arguments]
    assert [reason and re.findall(r"[A-Z]+(?==\.\.\.)", reason) for reason in reasons] == [
        ["MODEL"], ["DATA"], None, None, None,
    ]  # fmt: skip


def test_the_variables_of_the_trainer_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.env").write_text("FROM_FILE=1\n")
    text = f"""export EXPORTED=1
declare -x DECLARED=1
NOT=1
set -a
. more.env
set +a
INLINE=1 env ENV=1 {TRAINER} a=1
"""
    command = read(tmp_path, text, GIVEN="1")
    names = {"EXPORTED", "DECLARED", "NOT", "FROM_FILE", "INLINE", "GIVEN"}
    assert names & command.environment.keys() == names - {"NOT"}
    assert command.launcher == ("env", "ENV=1", "python3", "-m")
