"""Replay that did nothing is an error in whichever pass it was."""

import json
from pathlib import Path

import pytest

from tests.integration.torchrun import run_ranks

pytestmark = pytest.mark.integration


def test_an_update_that_does_not_replay_is_an_error(
    sealed_run: Path, tiny_model: Path, tmp_path: Path
):
    """The log-prob pass of R3 replays, and so does R2's first epoch: neither hides an update that
    routed natively. Control: the same step without the fault."""
    run_ranks("tests.integration.training_replay.silent", 1, sealed_run, tiny_model, tmp_path)
    found = json.loads((tmp_path / "silent.json").read_text())
    assert found.pop("R3 nowhere") is None
    assert "step 0, update epoch 0, layer 0: 0 rows were replayed" in found["R3 whole update"]
    for case in ("R3 second epoch", "R2 second epoch"):
        assert "step 0, update epoch 1, layer 0: 0 rows were replayed" in found[case]
