"""`retrace runs`: output, confirmation and refusals."""

import pytest
from rich.text import Text
from typer.testing import CliRunner

from pipeline.cli import _app
from pipeline.run.attempts import end_attempt
from pipeline.store import open_store
from tests.attempts import make_attempt
from tests.samples import make_samples, sealed_r3
from tests.unit.upkeep.test_whole_runs import make_run


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The default store of a working directory, with a finished run, a failed run and a folder of
    photos."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name, reason in (("done", "finished"), ("broken", "failed")):
        run = make_run(tmp_path / "outputs/store" / name, 3)
        end_attempt(run, make_attempt(run, 0, 3), reason, "no space left\nmore of it")
    (tmp_path / "outputs/store/photos").mkdir()
    (tmp_path / "outputs/store/photos/cat.png").write_bytes(b"cat")
    return tmp_path / "outputs/store"


def command(*words: str, answer: str = "", expect: int = 0) -> str:
    result = CliRunner().invoke(_app, ["runs", *words], input=answer)
    assert result.exit_code == expect, result.output
    return result.output


def test_ls_lists_the_default_store(store):
    lines = command("ls").splitlines()
    assert lines[0].split() == [
        "name",
        "state",
        "step",
        "reward",
        "size",
        "created",
        "last",
        "write",
    ]
    rows = {line.split()[0]: line.split()[1:4] for line in lines[1:4]}
    assert rows == {
        "broken": ["failed", "3/3", "0.750"],
        "done": ["finished", "3/3", "0.750"],
        "photos": ["no", "run", "—"],
    }
    assert lines[4:] == [
        "broken: no space left",
        "photos: no run.json and no sealed step",
    ]
    assert all(len(line) <= 80 for line in lines)
    assert command("ls", str(store)) == "\n".join(lines) + "\n"


def test_ls_of_places_that_are_not_stores_is_refused(store, monkeypatch):
    """A run, a recorded set and a file are refused; for a run, the error names its parent
    folder."""
    refusal = "error: {}: a run, expected a store of runs; list its parent: retrace runs ls {}\n"
    outputs = store.parent
    for folder, place, parent in (
        (store.parents[1], "outputs/store/done/", "outputs/store"),
        (store, "done", "."),
        (store / "done", ".", str(store)),
        (store / "done/steps", "..", str(store)),
        (outputs, f"file://{store}/done", f"file://{store}"),
    ):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        assert command("ls", place, expect=2) == refusal.format(place.rstrip("/"), parent)
        assert "\ndone " in command("ls", parent)
    monkeypatch.chdir(outputs)
    (outputs / "my.yaml").touch()
    assert command("ls", "my.yaml", expect=2) == (
        "error: my.yaml: a file, expected a folder or URI with runs\n"
    )
    sealed_r3(open_store(str(outputs / "set")), make_samples())
    assert command("ls", "set", expect=2) == (
        "error: set: a recorded set, expected a store of runs; list its steps: retrace traces ls "
        "set\n"
    )
    assert command("ls", "nothere") == "no runs in nothere: it does not exist or is empty\n"


LOGGED = """rollout worker 0 ended with exit code 78 and was not restarted. From logs/rollout-0.log:
  | 2026-11-22 07:55:15,200 ERROR operators.rollout: RewardError: sample 000000/2979/0: the reward \
function raised TypeError: string indices must be integers
  | Traceback (most recent call last):
rank 1 then ended: RuntimeError: Connection closed by peer"""
NOT_LOGGED = "rollout worker 0 ended with exit code -9. From a.log:\n  | loading\n  | KeyError: 7"


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            LOGGED,
            "RewardError: sample 000000/2979/0: the reward function raised TypeError: string "
            "indices must be integers",
        ),
        (NOT_LOGGED, "KeyError: 7"),
        (
            "training ended:\nrank 0: killed by signal 9\nrank 1 then ended: closed",
            "rank 0: killed by signal 9",
        ),
        ("not committed within 60 s: steps/000001/metrics.json", None),
    ],
)
def test_ls_shows_the_cause_of_a_failure(tmp_path, message, cause):
    """The line shows the cause, not the log's name. On a terminal, it is cut to the terminal's
    width."""
    run = make_run(tmp_path / "store/broken", 1)
    end_attempt(run, make_attempt(run, 0, 3), "failed", message)
    line = f"broken: {cause or message}"
    assert command("ls", str(tmp_path / "store")).splitlines()[2:] == [line]
    env = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "60"}
    shown = CliRunner(env=env).invoke(_app, ["runs", "ls", str(tmp_path / "store")])
    [last] = Text.from_ansi(shown.output).plain.splitlines()[2:]
    assert last == (line if len(line) <= 60 else f"{line[:59]}…")


def test_rm_asks_before_it_removes_a_run(store):
    """The command finds a run in the default store by its name, without a path."""
    asked = command("rm", "done", answer="n\n", expect=1)
    assert asked.startswith("Remove outputs/store/done (finished, 3/3 steps, ")
    assert (store / "done").is_dir()
    assert "freed" in command("rm", "done", answer="y\n")
    assert not (store / "done").exists()
    assert "freed" in command("rm", str(store / "broken"), "--yes")
    assert command("rm", "done", expect=2).startswith("error: done: expected a run, found nothing")


def test_rm_of_a_running_run_needs_force(store):
    run = make_run(store / "busy", 1)
    make_attempt(run, 0, 8)
    assert "remove it with --force" in command("rm", "busy", "--yes", expect=2)
    assert (store / "busy/run.json").is_file()
    assert "freed" in command("rm", "busy", "--yes", "--force")
    assert not (store / "busy").exists()


def test_names_are_completed(store):
    done = CliRunner().invoke(
        _app,
        [],
        prog_name="retrace",
        env={
            "_RETRACE_COMPLETE": "complete_bash",
            "COMP_WORDS": "retrace runs rm d",
            "COMP_CWORD": "3",
        },
    )
    assert done.output.split() == ["done"]
