"""What follows from settings."""

from pipeline.config.actor import RouterReplay


def test_which_mode_records_and_which_replays():
    """With replay_file, R2 takes what an earlier log-prob pass recorded."""
    cases = (
        (RouterReplay(mode="disabled"), False, False),
        (RouterReplay(mode="R2"), True, False),
        (RouterReplay(mode="R2", replay_file="set"), False, True),
        (RouterReplay(mode="R3"), False, True),
        (RouterReplay(mode="R3", replay_file="set"), False, True),
    )
    for replay, records, replays in cases:
        assert (replay.records_routes, replay.replays_recorded) == (records, replays)
