"""Artifacts neither fail nor delay a run, and of versions that wait only the last is made."""

import threading
from typing import Any

import httpx
import pytest

from pipeline.flows import artifacts as module
from pipeline.flows.artifacts import Artifacts
from tests.patience import PATIENCE_S, eventually


class Server:
    """Takes artifacts, unless it is away; the first waits until it may go on."""

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


def test_each_has_the_runs_name(server: Server):
    with Artifacts("main", pytest.fail) as artifacts:
        artifacts.table("steps", [{"step": 0}], "of steps")
        artifacts.text("report", "# text")
        artifacts.link("store", "s3://bucket/main")
    assert server.made == [
        ("main-steps", [{"step": 0}], "of steps"),
        ("main-report", "# text"),
        ("main-store", "s3://bucket/main"),
    ]


def test_only_the_last_of_those_that_wait_is_made(server: Server):
    server.go.clear()
    with Artifacts("main", pytest.fail) as artifacts:
        artifacts.text("report", "0")
        assert server.begun.wait(PATIENCE_S)
        for number in range(1, 9):
            artifacts.text("report", str(number))
        server.go.set()
    assert server.made == [("main-report", "0"), ("main-report", "8")]


def test_progress_is_made_once_and_updated(server: Server):
    with Artifacts("main", pytest.fail) as artifacts:
        artifacts.status("rollout")
        eventually(lambda: bool(server.made), lambda: "no progress was made")
        artifacts.progress(50.0)
    assert server.made == [("main-progress", 0.0, "rollout"), ("update", 50.0, "rollout")]


def test_a_server_that_is_away_is_told_once(server: Server):
    server.away = True
    warnings: list[str] = []
    with Artifacts("main", warnings.append) as artifacts:
        for name in ("a", "b", "c"):
            artifacts.text(name, "text")
    assert artifacts.failures == 3
    assert len(warnings) == 1
    assert "the run goes on" in warnings[0]
