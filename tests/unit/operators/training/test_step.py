"""When passes must have used the routes of a step."""

import pytest

from operators.training.replay.counts import LayerCounts
from operators.training.step import must_replay
from tests.integration.training_replay.sealed import config_of

REPLAYED = {"update epoch 0": {1: LayerCounts(8, 0, 0, 8)}}


@pytest.mark.parametrize("mode", ["disabled", "R2", "R3"])
def test_while_only_the_critic_is_trained_no_pass_need_replay(mode: str):
    """R2 records in the log-prob pass, and bypass_mode leaves out the one that R3 would replay in;
    where a pass replays all the same, it must do so whole."""
    config = config_of(
        router_replay={"mode": mode},
        algorithm={"adv_estimator": "gae"},
        trainer={"critic_warmup": 2},
    )
    assert must_replay(config, 1, {}) is False
    for step in (1, 2):
        assert must_replay(config, step, REPLAYED) is (mode != "disabled")
    assert must_replay(config, 2, {}) is (mode != "disabled")
