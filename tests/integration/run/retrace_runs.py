"""Functions that call `retrace` commands as a user does, and find the workers of a run."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.paths import ROOT

EXAMPLE = ROOT / "examples/quickstart.yaml"
RETRACE = [sys.executable, "-c", "from pipeline.cli import main; main()"]


def small(folder: Path, name: str, *more: str) -> list[str]:
    """Return settings that shrink the quickstart to a small run, with all files under `folder`.

    Args:
        folder: The folder of the store and of local files.
        name: The run's name.
        more: Further settings, which take precedence.
    """
    return [
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir={folder}",
        f"store.uri={folder}/store",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "data.val_files=null",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        *more,
    ]


def start(log: Path, *settings: str) -> subprocess.Popen[bytes]:
    """Start `retrace run` on the quickstart with these settings; its output goes to `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [*RETRACE, "run", str(EXAMPLE), *settings],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "COLUMNS": "240"},
        )


def run(*settings: str, expect: int = 0) -> str:
    """Run `retrace run` to completion and return its output."""
    return command("run", str(EXAMPLE), *settings, expect=expect)


def command(*arguments: str, expect: int = 0) -> str:
    """Run any `retrace` command and return its output on stdout and stderr."""
    done = subprocess.run(
        [*RETRACE, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "240"},
        timeout=800,
        check=False,
    )
    assert done.returncode == expect, (
        f"exit code {done.returncode}, expected {expect}\n{done.stdout}\n{done.stderr[-8000:]}"
    )
    return done.stdout + done.stderr


def workers(run_uri: str, module: str) -> list[psutil.Process]:
    """Return the processes of a run's workers, without their guards and without torchrun."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        wrappers = {"pipeline.launch.guard", "torch.distributed.run"}
        if run_uri in line and module in line and not wrappers & set(line):
            found.append(process)
    return found
