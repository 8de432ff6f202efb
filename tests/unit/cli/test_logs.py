"""`retrace logs`: the end of each worker's log, and new lines."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import _app
from pipeline.inputs.stage import stage
from pipeline.run import keys
from pipeline.run.attempts import take_attempt
from pipeline.run.commit import commit, new_write_id
from pipeline.run.owner import owner_json, this_owner
from pipeline.store import open_store
from tests.attempts import distant_owner, living_owner
from tests.patience import PATIENCE_S, eventually
from tests.tiny_models import make_tiny
from tests.unit.inputs.small_inputs import check, write_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A working directory with the settings of the run 'test', which is in the default store."""
    folder = tmp_path_factory.mktemp("logs")
    settings = write_inputs(folder, make_tiny(folder / "model", "qwen3_moe"))
    stage(check(settings, f"store.uri={folder}/outputs/store"))
    text = settings.read_text().replace(f"{folder}/store", f"{folder}/outputs/store")
    settings.write_text(text)
    return folder


@pytest.fixture
def logs(folder, monkeypatch) -> Path:
    """The folder of the run's logs, which contains the logs of two workers."""
    monkeypatch.chdir(folder)
    logs = folder / "outputs/test/logs"
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "rollout-0.log").write_text("".join(f"rollout {i}\n" for i in range(80)))
    (logs / "training-0.log").write_text("training 0\ntraining 1\n")
    return logs


def command(*words: str, expect: int = 0) -> list[str]:
    result = CliRunner().invoke(_app, ["logs", *words])
    assert result.exit_code == expect, result.output
    return result.output.splitlines()


@pytest.mark.parametrize("named", ["test", "outputs/store/test", "config.yaml"])
def test_the_last_lines_of_each_worker_are_shown(logs, named):
    ends = [f"rollout {i}" for i in range(30, 80)]
    both = ["==> rollout-0 <==", *ends, "==> training-0 <==", "training 0", "training 1"]
    assert command(named) == both
    assert command(named, "--worker", "rollout-0") == ends
    assert command(named, "--worker", "training-0", "-n", "1") == ["training 1"]


def test_settings_may_be_given_as_for_the_run(logs):
    name = "trainer.experiment_name=other"
    (logs.parents[1] / "other/logs").mkdir(parents=True, exist_ok=True)
    (logs.parents[1] / "other/logs/training-0.log").write_text("other\n")
    assert command("config.yaml", name) == ["other"]
    assert "not a settings file" in command("test", name, expect=2)[0]


def test_an_unknown_worker_is_refused(logs):
    assert command("test", "--worker", "rollout-1", expect=2) == [
        "error: --worker rollout-1: no such worker; found rollout-0, training-0"
    ]


def test_a_missing_settings_file_is_refused(logs, folder):
    assert command("my.yaml", expect=2) == [
        f"error: my.yaml: no such settings file (working directory: {folder})"
    ]
    assert "no run there" in command(f"file://{folder}/my.yaml", expect=2)[0]


def test_a_folder_without_logs_is_refused(logs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [said] = command(str(logs.parents[1] / "store/test"), expect=2)
    assert said.startswith(
        "error: outputs/test/logs contains no logs of the run 'test' (store: file://"
    )


def test_logs_of_a_run_on_kubernetes_are_elsewhere(logs, folder):
    """The error names the commands that show the logs."""
    for log in logs.iterdir():
        log.unlink()
    store = open_store(str(folder / "outputs/store/test"))
    commit(
        store,
        keys.attempt(0),
        {"number": 0, "owner": owner_json(this_owner("0a1b"))},
        new_write_id(),
    )
    [said] = command("test", expect=2)
    store.delete(keys.attempt(0))
    for component in ("rollout", "training"):
        labels = f"retrace.dev/run=test,app.kubernetes.io/component={component}"
        assert f"-f -l {labels};" in said
    assert said.endswith("-l prefect.io/flow-run-id=0a1b")


def test_logs_of_a_run_on_another_machine_are_not_awaited(logs, folder):
    for log in logs.iterdir():
        log.unlink()
    store = open_store(str(folder / "outputs/store/test"))
    body = {"number": 0, "owner": owner_json(distant_owner())}
    commit(store, keys.attempt(0), body, new_write_id())
    [said] = command("test", "-f", expect=2)  # it does not wait
    store.delete(keys.attempt(0))
    assert f"its newest start was process {os.getpid()} on elsewhere" in said


@contextlib.contextmanager
def following(said: Path, *words: str) -> Iterator[Callable[[str], None]]:
    """Run the command, and end it with Ctrl-C; yields a function that waits for a line."""

    def see(line: str) -> None:
        eventually(lambda: line in said.read_text().splitlines(), said.read_text)

    program = "from pipeline.cli import main; main()"
    with said.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", program, "logs", *words], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield see
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130, said.read_text()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in said.read_text()


def test_following_prints_new_lines(logs, folder):
    """New lines are printed when they are complete, even if the log was replaced. Ctrl-C ends the
    command without a traceback."""
    with following(folder / "said", "test", "-f", "-n", "1") as see:
        see("training 1")
        with (logs / "rollout-0.log").open("a") as log:
            log.write("more\nhalf a")
            log.flush()
            see("rollout-0 | more")
            log.write(" line\n")
        see("rollout-0 | half a line")
        (logs / "training-0.log").write_text("again\n")
        see("training-0 | again")
        (logs / "rollout-1.log").write_text("a new worker\n")
        see("rollout-1 | a new worker")
    (logs / "rollout-1.log").unlink()


@pytest.mark.parametrize("named", ["name", "uri", "settings"])
def test_following_begins_before_the_workers_do(tmp_path, folder, monkeypatch, named):
    """Neither the run nor its logs exist yet. The command waits for each of them."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(folder / "config.yaml", tmp_path / "config.yaml")
    overrides = (f"store.uri={tmp_path}/outputs/store",)
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace(f"{folder}/outputs", f"{tmp_path}/outputs"))
    run = {"name": "test", "uri": f"file://{tmp_path}/outputs/store/test"}.get(named, "config.yaml")
    said = tmp_path / "said"
    with following(said, run, "-f", "--worker", "training-0") as see:
        eventually(lambda: "waiting for logs" in said.read_text(), said.read_text)
        inputs = check(tmp_path / "config.yaml", *overrides)
        take_attempt(inputs.store, inputs.config, living_owner())
        stage(inputs)
        logs = tmp_path / "outputs/test/logs"
        logs.mkdir(parents=True)
        (logs / "rollout-0.log").write_text("not asked for\n")
        (logs / "training-0.log").write_text("training 0\n")
        see("training 0")
    assert said.read_text().count("waiting for logs") == 1
    assert "not asked for" not in said.read_text()
