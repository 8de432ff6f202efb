"""examples/mismatch: the settings of the arms, and the choice of arms to run."""

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
def test_the_settings_of_each_arm_are_valid(arm):
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


def test_arms_differ_in_names_and_settings():
    """Otherwise two lines of a plot would show the same experiment."""
    assert len({arm.name for arm in ARMS}) == len({arm.label for arm in ARMS}) == len(ARMS)
    assert len({(str(arm.overrides), arm.policy) for arm in ARMS}) == len(ARMS)


def test_a_short_run_has_one_seed_and_a_full_run_has_all():
    short = arm_runs([], full=False, out=OUT)
    full = arm_runs([], full=True, out=OUT)
    assert [run.name for run in short] == [f"{arm.name}-1" for arm in ARMS if not arm.full]
    assert sorted(run.name for run in full) == sorted(
        f"{arm.name}-{seed}" for arm in ARMS for seed in SEEDS
    )
    assert [run.seed for run in full] == sorted(run.seed for run in full)
    assert [run.name for run in arm_runs(["r2", "r3"], False, OUT)] == ["r2-1", "r3-1"]
    with pytest.raises(ValueError, match=r"arm r4: unknown; expected one of native, "):
        arm_runs(["r3", "r4"], False, OUT)


class Ready:
    settings = {"trainer": {"total_training_steps": 2}}  # noqa: RUF012


@pytest.fixture
def checked(monkeypatch) -> list[str]:
    """Replace the settings check; return the names of the checked runs."""
    names: list[str] = []

    def check(settings: Path, words: list[str]) -> Ready:
        names.append(words[0].partition("=")[2])
        return Ready()

    monkeypatch.setattr(retrace, "check", check)
    return names


def put(run: ArmRun, state: str, steps: int = 2, message: str = "") -> None:
    """Store a run with finished steps and an attempt that ended in the given state."""
    made = MemoryStore()
    write_run(made, SAMPLES, "R3")
    settings = {"trainer": {"total_training_steps": 2}}
    store = retrace.open_store(str(run.uri))
    body = description_json(replace(read_created(made), settings=settings))
    commit(store, keys.run_json(), body, "a")
    for step in range(steps):
        commit(store, keys.metrics(step), {"step": step, "metrics": {REWARD: 0.5}}, "a")
    end_attempt(store, make_attempt(store, 0, 2), state, message)


def test_an_arm_that_is_named_twice_is_run_once(tmp_path):
    assert arm_runs(["r3", "native", "r3"], False, tmp_path) == [
        ArmRun(arm, 1, tmp_path) for name in ("r3", "native") for arm in ARMS if arm.name == name
    ]


def test_finished_arms_are_not_run_again(tmp_path, checked):
    """Failed, missing and lengthened arms are run. All arms are checked."""
    runs = arm_runs(["native", "tis", "r3", "dense"], False, tmp_path)
    assert running.unfinished(runs, {}) == runs
    put(runs[0], "finished")
    put(runs[1], "failed")
    put(runs[3], "finished", steps=1)
    assert running.unfinished(runs, {}) == runs[1:]
    assert checked == [run.name for run in runs] * 2


@pytest.mark.usefixtures("checked")
def test_nothing_is_built_or_run_if_all_arms_are_finished(tmp_path, monkeypatch, capsys):
    # The first import of pyplot runs a command that lists the fonts, so it comes before the patch.
    pytest.importorskip("matplotlib.pyplot", reason="no matplotlib: make install")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail(f"started {a}"))
    for run in arm_runs(["native", "r3"], False, tmp_path):
        run.policy.mkdir(parents=True, exist_ok=True)
        put(run, "finished")
    assert program.main(["--arms", "native,r3", "--out", str(tmp_path)]) == 0
    assert "2 of 2 arms are finished" in capsys.readouterr().out
    assert (tmp_path / "mismatch.md").is_file()


def test_nothing_starts_without_matplotlib(tmp_path, monkeypatch, capsys):
    """Otherwise the command would fail only when it drew the plots, after the first arm."""
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        program.main(["--out", str(tmp_path)])
    assert ended.value.code == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "matplotlib is not installed, but the page's plots require it" in printed
    assert "pip install 'retrace-moe[plots]'" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def with_matplotlib(monkeypatch):
    """Report matplotlib as installed, for tests that draw nothing and so do not need it."""
    monkeypatch.setattr(program, "find_spec", lambda name: True)


PROGRAM = "import sys; sys.exit({} if 'trainer.experiment_name=native-1' in sys.argv else 0)"
"""A program that replaces `retrace run` and ends the arm `native` with an exit code."""
FAILURE = """training worker 0 ended with exit code 78. From training-0.log:
  | 2026-01-01 10:00:00,000 ERROR training rank 1 failed: UpdateError: NaN in all mini-batches
"""


@pytest.mark.usefixtures("checked")
def test_a_failed_arm_does_not_keep_the_next_arms_from_running(tmp_path, monkeypatch, capsys):
    """The failed arm is reported at the end and on the page, and its costs are included."""
    pytest.importorskip("matplotlib", reason="no matplotlib: make install")
    monkeypatch.setattr(running, "_PROGRAM", PROGRAM.format(3))
    (tmp_path / "policy/moe").mkdir(parents=True)
    native, r3 = arm_runs(["native", "r3"], False, tmp_path)
    put(native, "failed", 1, FAILURE)
    assert program.main(["--arms", "native,r3", "--out", str(tmp_path)]) == 1
    error = "ended at step 1: UpdateError: NaN in all mini-batches"
    assert f"native-1 failed: {error}\nrun the same command again" in capsys.readouterr().err
    assert list(running.read_costs(tmp_path)) == [native.name, r3.name]
    assert f"\n- native-1 {error}\n" in (tmp_path / "mismatch.md").read_text()


@pytest.mark.parametrize("code", [130, 143])
@pytest.mark.usefixtures("checked", "with_matplotlib")
def test_an_arm_that_was_stopped_by_a_signal_ends_the_command(tmp_path, monkeypatch, code):
    monkeypatch.setattr(running, "_PROGRAM", PROGRAM.format(code))
    (tmp_path / "policy/moe").mkdir(parents=True)
    assert program.main(["--arms", "native,r3", "--out", str(tmp_path)]) == code
    assert list(running.read_costs(tmp_path)) == ["native-1"]


@pytest.mark.usefixtures("checked", "with_matplotlib")
def test_ctrl_c_ends_the_command(tmp_path, monkeypatch):
    """A terminal's Ctrl-C reaches this command as well as the arm."""
    started = []

    def interrupted(run: ArmRun, more: dict[str, str]) -> None:
        started.append(run.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "run_arm", interrupted)
    (tmp_path / "policy/moe").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        program.main(["--arms", "native,r3", "--out", str(tmp_path)])
    assert started == ["native-1"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--arms", "r3,r9"], "arm r9: unknown; expected one of native, "),
        (["--arms", "natve"], "r3-tis; did you mean native?"),
        (["trainer.nnode=2"], "trainer.nnode"),
        (["trainer.nnodes"], "trainer.nnodes: expected KEY=VALUE"),
    ],
)
@pytest.mark.usefixtures("with_matplotlib")
def test_wrong_arguments_are_reported_before_anything_is_built(
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
