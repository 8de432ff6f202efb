"""Waiting for routes that are still being read, and the parts of sequences on this rank."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from operators.training.passes import share as module
from operators.training.passes.share import lay_out_share

IDS = ("000000/0/0", "000000/0/1", "000000/1/0")


class Arriving(dict[str, Any]):
    """Routes that are still being read."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    def await_all(self, ids: list[str]) -> None:
        self.calls.append(ids)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank, its data, a mini-batch of its first two samples, and the calls that wait."""
    calls: list[Any] = []
    monkeypatch.setattr(module, "await_ranks", lambda: calls.append("ranks"))
    monkeypatch.setattr(module, "without_loss", lambda config: frozenset({"abort"}))
    monkeypatch.setattr(module, "lay_out", lambda micro, ids, contents: (micro, ids, contents))
    position = SimpleNamespace(dp_rank=0, sequence="sequence", context="context")
    rank = SimpleNamespace(geometry=SimpleNamespace(layers=(0, 1)), position=position, config=None)
    data = SimpleNamespace(
        ids=dict(enumerate(IDS)),
        routes=Arriving(calls),
        read_rows=set(),
        samples={},
        untrained=frozenset(),
    )
    micro_batches = [SimpleNamespace(rows=[0]), SimpleNamespace(rows=[1])]
    elsewhere = [SimpleNamespace(rows=[2])]
    batch = SimpleNamespace(
        shares=[micro_batches, elsewhere], rows=lambda dp_rank: np.array([0, 1])
    )
    return SimpleNamespace(rank=rank, data=data, batch=batch, calls=calls)


def test_ranks_wait_once_for_the_routes_of_a_mini_batch(world: Any):
    made = lay_out_share(world.rank, world.data, world.batch, world.data.routes)
    assert world.calls == [[IDS[0], IDS[1]], "ranks"]
    assert world.data.read_rows == {0, 1, 2}
    lay_out_share(world.rank, world.data, world.batch, world.data.routes)
    assert len(world.calls) == 2, "the same samples in another epoch"
    contents = made[1][2]
    assert (contents.sequence, contents.context) == ("sequence", "context")
    assert contents.routes is world.data.routes
    assert contents.geometry is world.rank.geometry
    assert len(made) == 2
