"""Copy the settings of verl that some tests need.

`python scripts/verl_sources.py CHECKOUT` reads a git checkout of verl, bare or not, and writes into
tests/unit/config/verl/:

- `jobs.json`: the arguments that some of verl's scripts (JOBS) pass to the trainer of PPO or DAPO.
  bash runs each script in an empty folder, with only harmless programs and a `python3` that records
  its arguments. The recorded settings are therefore those that the script uses by default.
- `ppo_megatron_trainer-VERSION.yaml`: verl's generated settings file of each version.

`jobs.json` contains only keys and values, and is committed. The settings files belong to verl and
are not committed. Tests that need them are skipped if they are missing.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = Path("tests/unit/config/verl")
VERSIONS = ("v0.6.0", "v0.6.1", "v0.7.0", "v0.8.0", "v0.9.0")
JOBS = {
    "v0.9.0": (
        "examples/router_replay/run_qwen3_30b_a3b_megatron.sh",
        "examples/grpo_trainer/run_deepseek_v3_671b_megatron.sh",
        "examples/grpo_trainer/run_moonlight_16b_a3b_megatron.sh",
        "examples/ppo_trainer/run_qwen3_8b_megatron.sh",
        "examples/tuning/lora/run_qwen3_30b_a3b_megatron.sh",
    ),
    "v0.7.0": ("recipe/dapo/test_dapo_qwen3_moe_30b_megatron_fp16.sh",),
}
"""The scripts of each version; v0.7.0 is the last version that contains the recipes."""
GENERATED = "verl/trainer/config/_generated_ppo_megatron_trainer.yaml"
HOME = "/home/user"
VARIABLES = {"HOME": HOME, "RAY_DATA_HOME": f"{HOME}/verl"}
RECORD = """#!/bin/bash
case $1:$2 in
-m:*) printf "%s\\0" "$@" > "$RECORD" ;;
-c:*torch_npu*) exit 1 ;;
-c:*) echo cuda ;;
esac
"""
"""A stand-in for python3. It records its arguments, and makes scripts select their GPU settings:
torch_npu cannot be imported, and the device is cuda."""
SUBMIT = '#!/bin/bash\nwhile [ $# -gt 0 ] && [ "$1" != -- ]; do shift; done\nshift\n"$@"\n'
"""A stand-in for ray. It runs the part after `--` of `ray job submit ... -- python3 -m ...`."""
NOTHING = "#!/bin/bash\n"
DATE = "#!/bin/bash\necho 20260101_0000\n"
STUBS = {
    "python3": RECORD,
    "python": RECORD,
    "date": DATE,
    "ray": SUBMIT,
    **dict.fromkeys(("cp", "hf", "huggingface-cli", "mkdir", "rm", "tee", "torchrun"), NOTHING),
}
HARMLESS = ("awk", "basename", "cat", "cut", "dirname", "env", "grep", "sed", "seq", "tr")


def main(checkout: str) -> None:
    """Write the files to TARGET in the working directory."""
    git = ("git", "-C", checkout)
    for version in VERSIONS:
        text = _output(*git, "show", f"{version}:{GENERATED}")
        (TARGET / f"ppo_megatron_trainer-{version}.yaml").write_text(text, encoding="utf-8")
    scripts: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        programs = _make_programs(Path(folder) / "programs")
        for version, paths in JOBS.items():
            for path in paths:
                text = _output(*git, "show", f"{version}:{path}")
                scripts[path] = _run(text, programs, Path(folder) / "work")[2:]
    versions = ", ".join(
        f"{version} ({_output(*git, 'rev-parse', f'{version}^{{commit}}').strip()})"
        for version in JOBS
    )
    content = {"source": f"the scripts of verl {versions}", "scripts": scripts}
    (TARGET / "jobs.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{len(scripts)} scripts, {sum(map(len, scripts.values()))} arguments: {TARGET}")


def _make_programs(folder: Path) -> Path:
    folder.mkdir()
    for name, text in STUBS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name in HARMLESS:
        if (program := shutil.which(name)) is not None:
            (folder / name).symlink_to(program)
    return folder


def _run(text: str, programs: Path, work: Path) -> list[str]:
    """Return the arguments that the script passes to python3: `-m`, the module and its own."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    record = work.parent / "record"
    environment = {"PATH": str(programs), "RECORD": str(record), **VARIABLES}
    script = work.parent / "script.sh"
    script.write_text(text)
    subprocess.run(
        [os.fspath(shutil.which("bash") or "/bin/bash"), script],
        cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    arguments = record.read_text().split("\0")[:-1]
    return [argument.replace(str(work), f"{HOME}/work") for argument in arguments]


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
