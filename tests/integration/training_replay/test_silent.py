"""Replay that has no effect raises an error in every pass."""

import json
from pathlib import Path

import pytest

from tests.integration.torchrun import run_ranks

pytestmark = pytest.mark.integration


def test_an_update_that_does_not_replay_raises_an_error(
    sealed_run: Path, tiny_model: Path, tmp_path: Path
):
    """An update that routes natively raises an error, although an earlier pass has replayed.

    The earlier pass is the log-prob pass in R3, and the first epoch in R2. The control is the step
    without a fault.
    """
    run_ranks("tests.integration.training_replay.silent", 1, sealed_run, tiny_model, tmp_path)
    found = json.loads((tmp_path / "silent.json").read_text())
    assert found.pop("R3 no fault") is None
    assert "step 0, update epoch 0, layer 0: 0 rows were replayed" in found["R3 full update"]
    for case in ("R3 second epoch", "R2 second epoch"):
        assert "step 0, update epoch 1, layer 0: 0 rows were replayed" in found[case]
