"""`retrace logs`: the end of each worker's log, and new lines."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import _app
from pipeline.inputs.stage import stage
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
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
    from pipeline.store import open_store

    store = open_store(str(folder / "outputs/store/test"))
    commit(store, keys.attempt(0), {"number": 0, "owner": "0a1b"}, new_write_id())
    [said] = command("test", expect=2)
    store.delete(keys.attempt(0))
    for component in ("rollout", "training"):
        labels = f"retrace.dev/run=test,app.kubernetes.io/component={component}"
        assert f"-f -l {labels};" in said
    assert said.endswith("-l prefect.io/flow-run-id=0a1b")


def test_following_prints_new_lines(logs, folder):
    """New lines are printed when they are complete, even if the log was replaced. Ctrl-C ends the
    command without a traceback."""
    program = "from pipeline.cli import main; main()"
    words = ["logs", "test", "-f", "-n", "1"]
    said = folder / "said"

    def see(line: str) -> None:
        eventually(lambda: line in said.read_text().splitlines(), said.read_text)

    with said.open("wb") as out:
        following = subprocess.Popen(
            [sys.executable, "-c", program, *words], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        see("training 1")
        with (logs / "rollout-0.log").open("a") as log:
            log.write("more\nhalf a")
            log.flush()
            see("rollout-0 | more")
            log.write(" line\n")
        see("rollout-0 | half a line")
        (logs / "training-0.log").write_text("again\n")
        see("training-0 | again")
        following.send_signal(signal.SIGINT)
        assert following.wait(PATIENCE_S) == 130
    finally:
        following.kill()
        following.wait()
    assert "Traceback" not in said.read_text()
