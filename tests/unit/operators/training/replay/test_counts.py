"""The check that each pass replayed all valid rows of the step."""

import pytest

from operators.training.errors import ReplayError
from operators.training.replay.counts import LayerCounts, check_passes


def test_a_pass_that_did_not_replay_all_valid_rows_is_refused():
    """Cases: no pass, a coverage of 0, a missing layer, and rows that were not replayed."""
    right = {1: LayerCounts(90, 10, 4, 80), 2: LayerCounts(90, 10, 4, 70)}
    passes = {"log-prob pass": right, "update epoch 0": right}
    check_passes(0, passes, [1, 2], valid=90, rows=100)
    with pytest.raises(ReplayError, match="step 0: no pass replayed routes"):
        check_passes(0, {}, [1, 2], valid=90, rows=100)
    with pytest.raises(ReplayError, match="none of the 100 rows has a valid recording"):
        check_passes(0, passes, [1, 2], valid=0, rows=100)
    with pytest.raises(ReplayError, match="log-prob pass, layer 3: 0 rows were replayed"):
        check_passes(0, passes, [1, 2, 3], valid=90, rows=100)
    with pytest.raises(ReplayError, match="layer 1: 90 rows were replayed and 10 routed natively"):
        check_passes(0, passes, [1, 2], valid=91, rows=100)
    with pytest.raises(ReplayError, match="update epoch 0, layer 1: 0 rows were replayed"):
        check_passes(0, {**passes, "update epoch 0": {}}, [1, 2], valid=90, rows=100)
