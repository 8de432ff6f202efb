"""Copy the settings of verl that some tests need.

`python scripts/verl_sources.py CHECKOUT` reads a git checkout of verl, bare or not, and writes into
tests/unit/config/verl/:

- `examples.json`: the arguments that verl's Megatron scripts (examples, tests, recipes) pass to the
  trainer of PPO or DAPO. A script is included if it starts one of these trainers and needs no
  variables except HOME and RAY_DATA_HOME. For every other script, the file names the program that
  the script starts, or the variable that is missing. bash runs each script in an empty folder, with
  only harmless programs and a `python3` that records its arguments. The recorded settings are
  therefore those that the script uses by default. For scripts that use engines other than Megatron,
  the file contains only the settings of the algorithm (under `algorithms`).
- `ppo_megatron_trainer-VERSION.yaml`: verl's generated settings file of each version.

`examples.json` contains only keys and values, and is committed. The settings files belong to verl
and are not committed. Tests that need them are skipped if they are missing.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

TARGET = Path("tests/unit/config/verl")
VERSIONS = ("v0.6.0", "v0.6.1", "v0.7.0", "v0.8.0", "v0.9.0")
SCRIPTS = (("v0.9.0", ("examples", "tests", "verl")), ("v0.7.0", ("recipe",)))
"""Versions and folders of the scripts; v0.7.0 is the last version that contains the recipes."""
TRAINERS = ("verl.trainer.main_ppo", "recipe.dapo.main_dapo")
MARKS = ("model_engine=megatron", "strategy=megatron", "_megatron_trainer")
_ACTOR = "actor_rollout_ref.actor."
ALGORITHM = (
    "algorithm.",
    *(f"{_ACTOR}{name}" for name in ("policy_loss.", "clip_ratio", "kl_loss", "tau_")),
    *(f"{_ACTOR}{name}=" for name in ("loss_agg_mode", "loss_scale_factor", "use_kl_loss")),
    *(f"{_ACTOR}{name}=" for name in ("entropy_coeff", "ppo_epochs")),
    "critic.cliprange_value=",
    "critic.optim.",
    "reward_model.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "trainer.critic_warmup=",
    "trainer.experiment_name=",
)
"""Prefixes of settings that do not depend on the engine: the algorithm's settings, and the run's
name."""
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
    algorithms: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        programs = _make_programs(Path(folder) / "programs")
        for path, text in _texts(git):
            arguments, complaint = _run(text, programs, Path(folder) / "work")
            starts = arguments[:1] == ["-m"] and arguments[1] in TRAINERS
            if not any(mark in text for mark in MARKS):
                if starts:
                    algorithms[path] = [a for a in arguments if a.lstrip("+").startswith(ALGORITHM)]
            elif starts:
                scripts[path] = arguments[2:]
            else:
                left_out[path] = f"starts {arguments[1]}" if arguments else complaint
    versions = ", ".join(
        f"{version} ({_output(*git, 'rev-parse', f'{version}^{{commit}}').strip()})"
        for version, _ in SCRIPTS
    )
    content = {
        "source": f"the scripts of verl {versions}",
        "left_out": left_out,
        "scripts": scripts,
        "algorithms": {path: found for path, found in algorithms.items() if found},
    }
    (TARGET / "examples.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{len(scripts)} scripts, {sum(map(len, scripts.values()))} arguments: {TARGET}")


def _texts(git: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the path and text of each shell script that may start one of the trainers."""
    for version, roots in SCRIPTS:
        listed = _output(*git, "ls-tree", "-r", "--name-only", version, *roots)
        for path in listed.splitlines():
            text = _output(*git, "show", f"{version}:{path}") if path.endswith(".sh") else ""
            if "python3 -m" in text or "python -m" in text:
                yield path, text


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
    """Return the arguments that the script passes to python3, and an empty text.

    If the script does not start python3, return an empty list and the last message of bash.
    """
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
