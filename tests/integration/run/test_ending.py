"""However `retrace run` is ended, no process remains, and the same command continues the run."""

import re
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline.run import keys
from pipeline.run.commit import read_commit
from pipeline.store import Store, open_store
from tests.integration.run.retrace_runs import EXAMPLE, RETRACE, small, workers
from tests.integration.run.terminal import Shown, all_end, in_a_pipe, on_a_terminal
from tests.paths import ROOT
from tests.patience import eventually

pytestmark = pytest.mark.integration

IN_ORDER = "stopping cleanly (up to 15 s); a second signal stops immediately"
GO_ON = "the same command continues from the last commit"


@pytest.fixture
def without_a_prefect_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the run start its own Prefect server, with its database in the test's folder."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))


def at_work(run: Shown, ready: Callable[[], bool]) -> list[psutil.Process]:
    """Wait until the run is `ready`, and return its processes, including a guarded server."""

    def look() -> bool:
        assert run.process.poll() is None, run.text()
        return ready()

    eventually(look, run.text)
    found = run.descendants()
    lines = [" ".join(process.cmdline()) for process in found]
    servers = [line for line in lines if "prefect.server" in line]
    assert len([line for line in servers if "pipeline.launch.guard" in line]) == 1, lines
    assert len(servers) == 2, lines  # the guard, and the server that it started
    return found


def has_workers(store: Store) -> bool:
    both = ("operators.rollout", "operators.training")
    return all(workers(store.uri, module) for module in both)


def reason(store: Store, attempt: int) -> str:
    return str(read_commit(store, keys.stop(attempt))["reason"])


@pytest.mark.usefixtures("without_a_prefect_server")
def test_a_run_continues_after_each_way_of_ending_it(tmp_path: Path):
    """End one run on a terminal with Ctrl-C during training, with SIGTERM, and with Ctrl-C twice.

    Then run it in a pipe and end it with kill -9. Each start continues where the previous one
    ended.
    """
    settings = small(tmp_path, "ended", "trainer.total_training_steps=20")
    command = [*RETRACE, "run", str(EXAMPLE), *settings]
    store = open_store(str(tmp_path / "store/ended"))

    with on_a_terminal(command, ROOT) as run:
        started = at_work(run, lambda: store.size(keys.manifest(1)) is not None)
        run.press_ctrl_c()
        assert run.ended() == 130
        all_end(started)
        for shown in ("rollout-0", "starting the engine with policy 0", "training-0"):
            assert shown in run.text(), "the live display shows the activity of each worker"
        assert f"Ctrl-C: {IN_ORDER}" in run.text()
        assert run.text().rstrip().endswith(f"stopped; {GO_ON}")
        assert "Traceback" not in run.text()
        assert reason(store, 0) == "cancelled"
        assert store.size(keys.metrics(18)) is None, "the run ended too late for this test"

    with on_a_terminal(command, ROOT) as run:
        started = at_work(run, lambda: has_workers(store))
        assert re.search(r"\d+ steps are already finished", run.text())
        run.process.terminate()
        assert run.ended() == 143
        all_end(started)
        assert f"SIGTERM: {IN_ORDER}" in run.text()
        assert run.text().rstrip().endswith(f"stopped; {GO_ON}")
        assert "Traceback" not in run.text()
        assert reason(store, 1) == "cancelled"

    with on_a_terminal(command, ROOT) as run:
        started = at_work(run, lambda: has_workers(store))
        run.press_ctrl_c()
        eventually(lambda: IN_ORDER in run.text(), run.text)
        run.press_ctrl_c()
        assert run.ended() == 130
        all_end(started)
        assert f"stopped immediately; {GO_ON}" in run.text()
        assert "Traceback" not in run.text()

    with in_a_pipe(command, ROOT) as run:
        started = at_work(run, lambda: has_workers(store))
        run.process.kill()
        assert run.ended() == -9
        all_end(started)
