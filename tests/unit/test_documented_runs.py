"""Commands that the docs and the help print for runs are accepted as printed."""

import re
import shlex
from collections.abc import Iterator

import pytest
import typer

from pipeline.cli import _app
from pipeline.config.identity import differing
from pipeline.config.reading.load import load_config
from pipeline.config.rules.check import config_problems
from tests.paths import ROOT

EXAMPLE = ROOT / "examples/quickstart.yaml"
PAGES = ("README.md", "docs/algorithms.md", "docs/replay.md", "docs/store.md")
RUN = re.compile(r"retrace run (?:my|examples/quickstart)\.yaml ([^`#)\n]*=[^`#)\n]*)")


def pages() -> Iterator[tuple[str, str]]:
    """Each page, and the help of `retrace run`."""
    yield "--help", typer.main.get_command(_app).commands["run"].epilog
    for page in PAGES:
        yield page, (ROOT / page).read_text()


def commands() -> Iterator[tuple[str, str]]:
    """Page and settings of each `retrace run FILE KEY=VALUE...`; a command may be continued."""
    for page, text in pages():
        yield from ((page, found) for found in RUN.findall(re.sub(r"\\\n\s*", "", text)))


COMMANDS = list(commands())


def test_they_are_found():
    assert {page for page, _ in COMMANDS} == {"--help", *PAGES}
    assert any("replay_file" in settings for _, settings in COMMANDS)


@pytest.mark.parametrize(("page", "settings"), COMMANDS)
def test_a_printed_run_is_accepted(page: str, settings: str):
    """As settings, and beside the finished run of the same file: what a run may not change about
    itself has another run's name."""
    plain = load_config(EXAMPLE, []).config
    asked = load_config(EXAMPLE, shlex.split(settings)).config
    assert config_problems(asked, None) == [], page
    same_name = asked.trainer.experiment_name == plain.trainer.experiment_name
    assert not (differing(plain, asked) and same_name), page
