"""Run what is not finished: `retrace run`, one arm after the other.

An arm that is finished is not run again, one that was interrupted goes on: the
store has what there is. A run keeps the settings and the policy that it was begun with, so all
arms are checked before the first starts, also against the runs that are there.
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
    """The run's settings as `retrace run` takes them."""
    return [f"{key}={_text(value)}" for key, value in run.settings(more).items()]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def unfinished(runs: Sequence[ArmRun], more: dict[str, str]) -> list[ArmRun]:
    """Those that are to be run, or to go on. Policies that are not built yet are no mistake.

    Raises retrace.InputError when settings are wrong, or a run that is there was begun with others:
    remove it (`retrace runs rm`), or give the experiment another folder.
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
    """`retrace run` to its end, and note what it took. Raises CalledProcessError."""
    command = ["run", str(SETTINGS), *words_of(run, more)]
    print(f"\n{run.name}: retrace {shlex.join(command)}", flush=True)
    started, before = time.monotonic(), processor_s()
    subprocess.run([sys.executable, "-c", _PROGRAM, *command], check=True)
    note_costs(run.out, run.name, time.monotonic() - started, processor_s() - before)


def processor_s() -> float:
    """Seconds that the finished children of this process, and theirs, have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def note_costs(out: Path, name: str, wall_s: float, processor_s: float) -> None:
    """Add to what a part of the experiment took: an arm that went on has several attempts."""
    costs = read_costs(out)
    wall, processor = costs.get(name, (0.0, 0.0))
    costs[name] = (wall + wall_s, processor + processor_s)
    (out / "costs.json").write_text(json.dumps(costs, indent=1))


def read_costs(out: Path) -> dict[str, tuple[float, float]]:
    """Wall and processor seconds by part: a run's name, or `policy`."""
    path = out / "costs.json"
    if not path.is_file():
        return {}
    return {
        name: (wall, processor) for name, (wall, processor) in json.loads(path.read_text()).items()
    }
