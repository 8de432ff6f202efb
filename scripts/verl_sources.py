"""Copy from verl what some tests compare with, into a folder that git ignores.

`python scripts/verl_sources.py CHECKOUT` reads a git checkout of verl, bare or not, and writes into
tests/unit/config/verl/:

- `examples.json`: the arguments that each Megatron example script gives to verl's trainer. A script
  counts if it starts `verl.trainer.main_ppo` with Megatron and needs no variable but HOME and
  RAY_DATA_HOME; the others are listed with what they start or lack. bash runs it with a `python3`
  that writes down its arguments, in an empty folder and with harmless programs alone, so that the
  settings are those that the script's own defaults give.
- `ppo_megatron_trainer-VERSION.yaml`: verl's generated file of settings, for each version.

They are verl's and stay out of this repository; tests that need them say that they are skipped.
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
GENERATED = "verl/trainer/config/_generated_ppo_megatron_trainer.yaml"
HOME = "/home/user"
VARIABLES = {"HOME": HOME, "RAY_DATA_HOME": f"{HOME}/verl"}
RECORD = '#!/bin/bash\n[ "$1" = -m ] || exit 1\nprintf "%s\\0" "$@" > "$RECORD"\n'
"""Fails for `python3 -c 'import torch_npu'`: the settings are those for GPUs."""
NOTHING = "#!/bin/bash\n"
DATE = "#!/bin/bash\necho 20260101_0000\n"
STUBS = {
    "python3": RECORD,
    "python": RECORD,
    "date": DATE,
    "hf": NOTHING,
    "mkdir": NOTHING,
    "tee": NOTHING,
}
HARMLESS = ("awk", "basename", "cat", "cut", "dirname", "env", "grep", "sed", "seq", "tr")


def main(checkout: str) -> None:
    """Write the files below the working directory."""
    git = ("git", "-C", checkout)
    for version in VERSIONS:
        text = _output(*git, "show", f"{version}:{GENERATED}")
        (TARGET / f"ppo_megatron_trainer-{version}.yaml").write_text(text, encoding="utf-8")
    revision = VERSIONS[-1]
    commit = _output(*git, "rev-parse", f"{revision}^{{commit}}").strip()
    paths = _output(*git, "ls-tree", "-r", "--name-only", commit, "examples").splitlines()
    scripts: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        programs = _make_programs(Path(folder) / "programs")
        for path in paths:
            text = _output(*git, "show", f"{commit}:{path}") if path.endswith(".sh") else ""
            if "model_engine=megatron" not in text and "ppo_megatron_trainer" not in text:
                continue
            arguments, complaint = _run(text, programs, Path(folder) / "work")
            if arguments[:2] == ["-m", "verl.trainer.main_ppo"]:
                scripts[path] = arguments[2:]
            else:
                left_out[path] = f"starts {arguments[1]}" if arguments else complaint
    content = {
        "source": f"the examples of verl, {revision}, commit {commit}",
        "left_out": left_out,
        "scripts": scripts,
    }
    (TARGET / "examples.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
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


def _run(text: str, programs: Path, work: Path) -> tuple[list[str], str]:
    """The arguments of the script's python3, or none and the last thing that bash said."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    record = work.parent / "record"
    record.unlink(missing_ok=True)
    environment = {"PATH": str(programs), "RECORD": str(record), **VARIABLES}
    script = work.parent / "script.sh"
    script.write_text(text)
    done = subprocess.run(
        [os.fspath(shutil.which("bash") or "/bin/bash"), script],
        cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    if not record.exists():
        return [], done.stderr.strip().splitlines()[-1].replace(str(script), "script")
    arguments = record.read_text().split("\0")[:-1]
    return [argument.replace(str(work), f"{HOME}/work") for argument in arguments], ""


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
