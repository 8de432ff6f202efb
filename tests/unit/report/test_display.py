"""The display of a run in progress."""

import io
import logging

import pytest
from rich.console import Console

from pipeline import progress
from pipeline.report.display import Display, Pace, warnings_of


def terminal(**more: object) -> Console:
    """Return a console on a terminal of 100 columns."""
    return Console(
        file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm", **more}
    )


def live_lines(display: Display) -> list[str]:
    """Return the lines of the live part as text."""
    console = Console(file=io.StringIO(), width=100)
    console.print(display)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_live_part_on_a_terminal_shows_each_workers_activity(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    console = terminal()
    with Display(console) as display:
        folder = display.progress_folder
        assert folder is not None
        for worker in ("rollout-0", "rollout-2", "rollout-10"):
            said = progress.environment(folder / f"{worker}.json")
        monkeypatch.setenv(*said.popitem())
        progress.say("step 3 shard 10: generating", 64, "samples")
        display.phase("training", "step 3: 256 samples")
        display.step(3, 8)
        display.line("step 2 of 8: reward 0.5 [red]")
        head, *workers = live_lines(display)
    assert head.endswith("] step 3 of 8 · training: step 3: 256 samples")
    assert [line.split("  ")[:2] for line in workers] == [
        ["rollout-0", " starting"],
        ["rollout-2", " starting"],
        ["rollout-10", "step 3 shard 10: generating, 0 of 64 samples"],
    ]
    shown = console.file.getvalue()
    assert "] step 2 of 8: reward 0.5 [red]\n" in shown
    assert "\x1b[?25h" in shown[shown.rindex("\x1b[?25l") :], "the cursor is shown again"
    assert not folder.exists()


@pytest.mark.parametrize(
    "console",
    [
        Console(file=io.StringIO(), width=100),
        terminal(NO_COLOR="1"),
        terminal(TERM="dumb"),
    ],
    ids=["pipe", "NO_COLOR", "dumb"],
)
def test_outside_a_terminal_plain_lines_have_no_control_characters(console: Console):
    with Display(console) as display:
        assert display.progress_folder is None
        display.phase("flow", "staging inputs")
        display.step(0, 8)
        display.line("step 0 of 8: reward 0.5")
    printed = console.file.getvalue()
    assert [line.split("] ")[1] for line in printed.splitlines()] == [
        "flow: staging inputs",
        "run: step 0 of 8",
        "step 0 of 8: reward 0.5",
    ]
    assert printed.replace("\n", "").isprintable()


def test_remaining_time_is_estimated_from_finished_steps():
    """The estimate uses the mean time per step.

    The first step includes the start of the engines, so it is used only until another step is
    finished.
    """
    pace = Pace()
    pace.begin(4, 100.0)
    assert pace.left_s(130.0) is None
    pace.begin(3, 150.0)
    assert pace.left_s(150.0) == 150.0
    assert pace.left_s(160.0) == 140.0
    pace.begin(2, 170.0)
    assert pace.left_s(175.0) == 35.0
    assert pace.left_s(195.0) == 20.0, (
        "a step that takes longer than the mean counts as nearly done"
    )
    pace.begin(1, 180.0)
    assert pace.left_s(180.0) == 15.0


def test_outside_a_terminal_each_new_phase_is_one_line():
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


def test_warnings_of_the_store_are_shown_at_intervals():
    """Users who wait for a server to restart should see the reason, but not every retry."""
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
