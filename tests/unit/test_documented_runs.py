"""The `retrace run` commands in the docs and in the help are accepted as printed."""

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
    """Yield the name and text of each page, and of the help of `retrace run`."""
    yield "--help", typer.main.get_command(_app).commands["run"].epilog
    for page in PAGES:
        yield page, (ROOT / page).read_text()


def commands() -> Iterator[tuple[str, str]]:
    """Yield the page and the settings of each command `retrace run FILE KEY=VALUE...`. A command
    may span several lines."""
    for page, text in pages():
        yield from ((page, found) for found in RUN.findall(re.sub(r"\\\n\s*", "", text)))


COMMANDS = list(commands())


def test_each_page_has_a_command():
    assert {page for page, _ in COMMANDS} == {"--help", *PAGES}
    assert any("replay_file" in settings for _, settings in COMMANDS)


@pytest.mark.parametrize(("page", "settings"), COMMANDS)
def test_a_printed_command_is_accepted(page: str, settings: str):
    """The settings are valid, even after a finished run of the unchanged file.

    If a command changes settings that are fixed for a run, it must also give a new run name.
    """
    plain = load_config(EXAMPLE, []).config
    asked = load_config(EXAMPLE, shlex.split(settings)).config
    assert config_problems(asked, None) == [], page
    same_name = asked.trainer.experiment_name == plain.trainer.experiment_name
    assert not (differing(plain, asked) and same_name), page
