"""examples/mismatch: which arms are run, with which settings, and which not again."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import retrace
from examples.mismatch import __main__ as program
from examples.mismatch import running
from examples.mismatch.arms import ARMS, SEEDS, SETTINGS, ArmRun, arm_runs
from examples.mismatch.plots import COLORS
from examples.mismatch.results import REWARD
from pipeline.config.reading.load import load_config
from pipeline.config.rules.check import config_problems
from pipeline.run import keys
from pipeline.run.attempts import end_attempt
from pipeline.run.commit import commit
from pipeline.run.description import description_json, read_created
from tests.attempts import make_attempt
from tests.memory_store import MemoryStore
from tests.paths import ROOT
from tests.samples import write_run
from tests.stored_runs import SAMPLES

OUT = Path("outputs/mismatch")


@pytest.mark.parametrize("arm", ARMS, ids=[arm.name for arm in ARMS])
def test_settings_of_each_arm_are_accepted(arm):
    config = load_config(SETTINGS, running.words_of(ArmRun(arm, 2, OUT), {})).config
    assert config_problems(config, None) == []
    assert config.trainer.experiment_name == f"{arm.name}-2"
    assert (config.trainer.seed, config.data.seed) == (2, 2)
    assert config.actor_rollout_ref.model.path == f"outputs/mismatch/policy/{arm.policy}"
    replay = config.actor_rollout_ref.actor.router_replay.mode
    assert replay == {"r3": "R3", "r2": "R2"}.get(
        arm.name.replace("gspo-", "").split("-")[0], "disabled"
    )
    assert arm.name in COLORS


def test_arms_differ_in_what_they_are_named_for():
    """Else two lines of a plot would show one experiment."""
    assert len({arm.name for arm in ARMS}) == len({arm.label for arm in ARMS}) == len(ARMS)
    assert len({(str(arm.overrides), arm.policy) for arm in ARMS}) == len(ARMS)


def test_one_seed_of_the_short_ones_or_all():
    short = arm_runs([], full=False, out=OUT)
    full = arm_runs([], full=True, out=OUT)
    assert [run.name for run in short] == [f"{arm.name}-1" for arm in ARMS if not arm.full]
    assert sorted(run.name for run in full) == sorted(
        f"{arm.name}-{seed}" for arm in ARMS for seed in SEEDS
    )
    assert [run.seed for run in full] == sorted(run.seed for run in full)
    assert [run.name for run in arm_runs(["r2", "r3"], False, OUT)] == ["r2-1", "r3-1"]
    with pytest.raises(ValueError, match=r"arm r4: unknown; there are native, "):
        arm_runs(["r3", "r4"], False, OUT)


class Ready:
    settings = {"trainer": {"total_training_steps": 2}}  # noqa: RUF012


@pytest.fixture
def checked(monkeypatch) -> list[str]:
    """Names of the runs whose settings were checked; checking looks at nothing else."""
    names: list[str] = []

    def check(settings: Path, words: list[str]) -> Ready:
        names.append(words[0].partition("=")[2])
        return Ready()

    monkeypatch.setattr(retrace, "check", check)
    return names


def put(run: ArmRun, state: str, steps: int = 2) -> None:
    """A run in the store whose attempt ended so, after these steps."""
    made = MemoryStore()
    write_run(made, SAMPLES, "R3")
    settings = {"trainer": {"total_training_steps": 2}}
    store = retrace.open_store(str(run.uri))
    body = description_json(replace(read_created(made), settings=settings))
    commit(store, keys.run_json(), body, "a")
    for step in range(steps):
        commit(store, keys.metrics(step), {"step": step, "metrics": {REWARD: 0.5}}, "a")
    end_attempt(store, make_attempt(store, 0, 2), state, "")


def test_finished_arms_are_not_run_again(tmp_path, checked):
    """One that failed, one that is missing and one that is to be longer are; all are checked."""
    runs = arm_runs(["native", "tis", "r3", "dense"], False, tmp_path)
    assert running.unfinished(runs, {}) == runs
    put(runs[0], "finished")
    put(runs[1], "failed")
    put(runs[3], "finished", steps=1)
    assert running.unfinished(runs, {}) == runs[1:]
    assert checked == [run.name for run in runs] * 2


@pytest.mark.usefixtures("checked")
def test_nothing_is_built_or_run_when_everything_is_there(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="no matplotlib: make install")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail(f"started {a}"))
    for run in arm_runs(["native", "r3"], False, tmp_path):
        run.policy.mkdir(parents=True, exist_ok=True)
        put(run, "finished")
    assert program.main(["--arms", "native,r3", "--out", str(tmp_path)]) == 0
    assert "2 of 2 arms are finished" in capsys.readouterr().out
    assert (tmp_path / "mismatch.md").is_file()


def test_without_matplotlib_nothing_starts(tmp_path, monkeypatch, capsys):
    """Else the page would fail after the first arm."""
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        program.main(["--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "the page needs matplotlib: pip install 'retrace-moe[plots]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def with_matplotlib(monkeypatch):
    """For what draws nothing, so that it is tried without, too."""
    monkeypatch.setattr(program, "find_spec", lambda name: True)


@pytest.mark.usefixtures("checked", "with_matplotlib")
def test_a_failed_arm_ends_the_command_with_its_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(running, "_PROGRAM", "import sys; sys.exit(3)")
    (tmp_path / "policy/moe").mkdir(parents=True)
    assert program.main(["--arms", "native", "--out", str(tmp_path)]) == 3
    assert "native-1 failed; the same command again goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--arms", "r3,r9"], "arm r9: unknown; there are native, "),
        (["trainer.nnode=2"], "trainer.nnode"),
        (["trainer.nnodes"], "trainer.nnodes: expected KEY=VALUE"),
    ],
)
@pytest.mark.usefixtures("with_matplotlib")
def test_what_is_wrong_is_said_before_anything_is_built(
    tmp_path, monkeypatch, capsys, words, error
):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        program.main(["--out", str(tmp_path), *words])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_costs_of_several_attempts_add_up(tmp_path):
    assert running.read_costs(tmp_path) == {}
    running.note_costs(tmp_path, "r3-1", 60.0, 90.0)
    running.note_costs(tmp_path, "policies", 1.0, 2.0)
    running.note_costs(tmp_path, "r3-1", 30.0, 10.0)
    assert running.read_costs(tmp_path) == {"r3-1": (90.0, 100.0), "policies": (1.0, 2.0)}
