"""Properties that are derived from settings."""

from typing import Any

from pipeline.config.actor import RouterReplay
from pipeline.config.tree import RunConfig


def test_each_mode_records_or_replays_routes():
    """With replay_file, R2 replays the routes that an earlier log-prob pass recorded."""
    cases = (
        (RouterReplay(mode="disabled"), False, False),
        (RouterReplay(mode="R2"), True, False),
        (RouterReplay(mode="R2", replay_file="set"), False, True),
        (RouterReplay(mode="R3"), False, True),
        (RouterReplay(mode="R3", replay_file="set"), False, True),
    )
    for replay, records, replays in cases:
        assert (replay.records_routes, replay.replays_recorded) == (records, replays)


def test_steps_with_a_staleness_pass():
    """The first such step is step native_every, because step 0 trains on samples from policy 0.

    Without R3, bypass_mode leaves no native pass. A recorded set comes from other weights.
    """

    def steps(*, bypass: bool = False, staleness: int = 1, **replay: Any) -> list[int]:
        correction = {"uncorrected_staleness": True, "bypass_mode": bypass}
        config = RunConfig.model_validate(
            {
                "data": {"train_files": "prompts.parquet"},
                "actor_rollout_ref": {"model": {"path": "m"}, "actor": {"router_replay": replay}},
                "algorithm": {"rollout_correction": correction},
                "trainer": {
                    "experiment_name": "a",
                    "max_staleness": staleness,
                    "total_training_steps": 9,
                },
            }
        )
        return [step for step in range(12) if config.has_staleness_pass(step)]

    for mode in ("disabled", "R2", "R3"):
        assert steps(mode=mode, native_every=4) == [4, 8]
        assert steps(mode=mode, native_every=3) == [3, 6]
        assert steps(mode=mode, native_every=0) == []
        assert steps(mode=mode, native_every=1, staleness=0) == []
    assert steps(mode="disabled", native_every=4, bypass=True) == []
    assert steps(mode="R3", native_every=4, bypass=True) == [4, 8]
    assert steps(mode="R3", native_every=4, replay_file="set.json") == []
