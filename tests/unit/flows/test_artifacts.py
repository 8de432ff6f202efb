"""Artifacts do not fail or delay a run. If several versions of an artifact are pending, only the
last is created."""

import threading
from typing import Any

import httpx
import pytest

from pipeline.flows import artifacts as module
from pipeline.flows.artifacts import Artifacts
from tests.patience import PATIENCE_S, eventually


class Server:
    """Accepts artifacts, unless `away` is set. Each creation waits until `go` is set."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Event()
        self.away = False

    def take(self, *what: Any) -> str:
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        if self.away:
            raise httpx.ConnectError("away")
        self.made.append(what)
        return "id"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    for name, take in {
        "create_table_artifact": lambda rows, key, description: server.take(key, rows, description),
        "create_markdown_artifact": lambda text, key: server.take(key, text),
        "create_link_artifact": lambda uri, link_text, key: server.take(key, uri),
        "create_progress_artifact": lambda p, key, description: server.take(key, p, description),
        "update_progress_artifact": lambda id, p, text: server.take("update", p, text),
    }.items():
        monkeypatch.setattr(module, name, take)
    return server


def test_of_several_pending_versions_only_the_last_is_created(server: Server):
    server.go.clear()
    with Artifacts("main", pytest.fail) as artifacts:
        artifacts.text("report", "0")
        assert server.begun.wait(PATIENCE_S)
        for number in range(1, 9):
            artifacts.text("report", str(number))
        server.go.set()
    assert server.made == [("main-report", "0"), ("main-report", "8")]


def test_progress_is_created_once_and_then_updated(server: Server):
    with Artifacts("main", pytest.fail) as artifacts:
        artifacts.status("rollout")
        eventually(lambda: bool(server.made), lambda: "no progress artifact was created")
        artifacts.progress(50.0)
    assert server.made == [("main-progress", 0.0, "rollout"), ("update", 50.0, "rollout")]


def test_an_outage_of_the_server_is_shown_once(server: Server):
    server.away = True
    warnings: list[str] = []
    with Artifacts("main", warnings.append) as artifacts:
        for name in ("a", "b", "c"):
            artifacts.text(name, "text")
    assert artifacts.failures == 3
    assert len(warnings) == 1
    assert "the run continues" in warnings[0]
