"""The first signal ends a command cleanly, and a second one ends it immediately. Each case runs in
a separate process."""

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.patience import PATIENCE_S

SAYS = "stopping cleanly (up to 15 s); a second signal stops immediately\n"
GO_ON = "the same command continues from the last commit\n"
IN_ORDER = """
    try:
        say("working")
        time.sleep(600)
    finally:
        say("in order")
"""
NEVER_IN_ORDER = """
    try:
        say("working")
        time.sleep(600)
    finally:
        say("not yet")
        time.sleep(600)
"""


@contextmanager
def working(work: str, setup: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start a command, and wait until its `work` has printed "working"."""
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup ignores it
        "from pipeline.cli import ending\n"
        "def say(text): print(text, flush=True)\n"
        f"{textwrap.dedent(setup)}\n"
        f"def work():\n{textwrap.indent(textwrap.dedent(work), '    ')}\n"
        "sys.exit(ending.end_by_signals(work))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "working\n"
        try:
            yield command
        finally:
            command.kill()


@pytest.mark.parametrize(
    ("number", "name", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)]
)
def test_the_first_signal_ends_the_command_cleanly(number: signal.Signals, name: str, code: int):
    with working(IN_ORDER) as command:
        command.send_signal(number)
        out, errors = command.communicate(timeout=PATIENCE_S)
    assert (command.returncode, out) == (code, "in order\n")
    assert errors == f"{name}: {SAYS}stopped; {GO_ON}"


def test_closing_the_terminal_ends_the_command_immediately():
    """SIGHUP has no handler; guards then kill the children (tests/unit/test_orphans.py)."""
    with working(IN_ORDER) as command:
        command.send_signal(signal.SIGHUP)
        out, errors = command.communicate(timeout=PATIENCE_S)
    assert (command.returncode, out, errors) == (-signal.SIGHUP, "", "")


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGINT, signal.SIGTERM, 130),
        (signal.SIGTERM, signal.SIGINT, 143),
    ],
)
def test_the_second_signal_ends_the_command_immediately(
    first: signal.Signals, second: signal.Signals, code: int
):
    with working(NEVER_IN_ORDER) as command:
        command.send_signal(first)
        assert command.stdout.readline() == "not yet\n"
        command.send_signal(second)
        _, errors = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == code
    assert errors.endswith(f"{SAYS}stopped immediately; {GO_ON}")


def test_a_command_that_does_not_stop_cleanly_is_ended_by_the_timer():
    with working(NEVER_IN_ORDER, "ending._LIMIT_S = 0.5") as command:
        command.send_signal(signal.SIGTERM)
        _, errors = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 143
    assert errors.endswith(f"so stopped immediately; {GO_ON}")


@pytest.mark.parametrize(
    ("instead", "code", "says"),
    [
        ("raise RuntimeError('the server is gone')", 130, f"stopped; {GO_ON}"),
        ("return 1", 130, ""),  # the command has already printed its error
        ("return 0", 0, ""),  # the work was already finished
    ],
)
def test_errors_that_a_signal_causes_are_not_failures(instead: str, code: int, says: str):
    work = f"""
        try:
            say("working")
            time.sleep(600)
        except KeyboardInterrupt:
            {instead}
    """
    with working(work) as command:
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=PATIENCE_S)
    assert (command.returncode, errors) == (code, f"Ctrl-C: {SAYS}{says}")


def test_without_a_signal_exit_codes_and_errors_are_unchanged():
    with working("say('working'); return 7") as command:
        assert command.communicate(timeout=PATIENCE_S) == ("", "")
        assert command.returncode == 7
    with working("say('working'); raise RuntimeError('ours')") as command:
        _, errors = command.communicate(timeout=PATIENCE_S)
        assert errors.endswith("RuntimeError: ours\n")


def test_a_signal_that_was_ignored_stays_ignored():
    """A Ctrl-C that ends a script does not end the script's background jobs."""
    with working(IN_ORDER, "signal.signal(signal.SIGINT, signal.SIG_IGN)") as command:
        command.send_signal(signal.SIGINT)
        command.send_signal(signal.SIGTERM)
        _, errors = command.communicate(timeout=PATIENCE_S)
    assert (command.returncode, errors) == (143, f"SIGTERM: {SAYS}stopped; {GO_ON}")
