"""What the terminal shows while a run is at work."""

import io
import logging

from rich.console import Console

from pipeline.report.display import Display, warnings_of


def test_outside_a_terminal_each_new_phase_is_a_line():
    console = Console(file=io.StringIO(), width=80)
    with Display(console) as display:
        display.phase("rollout", "0/2 shards")
        display.phase("rollout", "0/2 shards")
        display.phase("rollout", "1/2 shards")
        display.line("step 1/8")
    lines = console.file.getvalue().splitlines()
    assert [line.split("] ")[1] for line in lines] == [
        "rollout: 0/2 shards",
        "rollout: 1/2 shards",
        "step 1/8",
    ]
    assert lines[0].startswith("[00:0")


def test_warnings_of_the_store_are_shown_now_and_then():
    """Who waits for a server that restarts should see why, but not each try."""
    console = Console(file=io.StringIO(), width=200)
    log = logging.getLogger("pipeline.store.s3_client")
    with Display(console) as display, warnings_of("pipeline.store", display.line):
        for number in range(5):
            log.warning("try %d follows", number)
        log.info("nothing to see")
    log.warning("after the run")
    text = console.file.getvalue()
    assert "try 0 follows" in text
    assert "try 1" not in text
    assert "nothing to see" not in text
    assert "after the run" not in text
