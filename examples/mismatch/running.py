"""Run the unfinished arms with `retrace run`, one after another.

The store shows which arms are finished. Finished arms are not run again, and interrupted arms
continue. A run keeps the settings and the policy with which it was first started. Therefore all
arms are checked against their existing runs before the first arm starts.
"""

import json
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import retrace
from examples.mismatch.arms import MODEL_PATH, SETTINGS, STORE, ArmRun
from examples.mismatch.make_policy import ADDITION

_PROGRAM = "from pipeline.cli import main; main()"


def words_of(run: ArmRun, more: dict[str, str]) -> list[str]:
    """Return the run's settings as arguments of `retrace run`."""
    return [f"{key}={_text(value)}" for key, value in run.settings(more).items()]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def unfinished(runs: Sequence[ArmRun], more: dict[str, str]) -> list[ArmRun]:
    """Return the runs to start or continue.

    The policies do not have to exist yet. Raises retrace.InputError if settings are invalid, or if
    an existing run has different settings. If a run has different settings, the user must remove
    it (`retrace runs rm`) or select a different folder for the experiment.
    """
    store = runs[0].out / STORE
    found = {listed.name: listed for listed in retrace.list_runs(store)} if store.is_dir() else {}
    waiting = []
    for run in runs:
        model = [] if run.policy.is_dir() else [f"{MODEL_PATH}={ADDITION / 'model'}"]
        ready = retrace.check(SETTINGS, [*words_of(run, more), *model])
        there = found.get(run.name)
        steps = ready.settings["trainer"]["total_training_steps"]
        if there is None or there.state != "finished" or there.finished_steps < steps:
            waiting.append(run)
    return waiting


def run_arm(run: ArmRun, more: dict[str, str]) -> None:
    """Execute `retrace run` until it ends, and record its costs. Raises CalledProcessError."""
    command = ["run", str(SETTINGS), *words_of(run, more)]
    print(f"\n{run.name}: retrace {shlex.join(command)}", flush=True)
    started, before = time.monotonic(), processor_s()
    done = subprocess.run([sys.executable, "-c", _PROGRAM, *command], check=False)
    note_costs(run.out, run.name, time.monotonic() - started, processor_s() - before)
    done.check_returncode()


def processor_s() -> float:
    """Return the processor seconds of finished child processes and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def note_costs(out: Path, name: str, wall_s: float, processor_s: float) -> None:
    """Add to the recorded costs of a part of the experiment.

    An arm that was interrupted and continued has several attempts, whose costs are added together.

    Args:
        out: The experiment's folder.
        name: The part: a run's name, or `policies`.
        wall_s: Seconds of wall time to add.
        processor_s: Seconds of processor time to add.
    """
    costs = read_costs(out)
    wall, processor = costs.get(name, (0.0, 0.0))
    costs[name] = (wall + wall_s, processor + processor_s)
    (out / "costs.json").write_text(json.dumps(costs, indent=1))


def read_costs(out: Path) -> dict[str, tuple[float, float]]:
    """Return the seconds of wall and processor time of each part: a run's name, or `policies`."""
    path = out / "costs.json"
    if not path.is_file():
        return {}
    return {
        name: (wall, processor) for name, (wall, processor) in json.loads(path.read_text()).items()
    }
