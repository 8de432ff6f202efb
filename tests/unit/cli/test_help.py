"""`--help`, `-h`, `--version` and shell completion."""

import re
import shlex
from collections.abc import Iterator

import pytest
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

import retrace
from pipeline.cli import _app
from tests.paths import ROOT


def commands() -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield a pair for each command and group: the words that call it, and the object itself."""
    waiting: list[tuple[tuple[str, ...], object]] = [((), get_command(_app))]
    while waiting:
        words, command = waiting.pop()
        yield words, command
        below = getattr(command, "commands", {})
        waiting += [((*words, name), one) for name, one in below.items()]


COMMANDS = dict(commands())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_ends_with_examples_codes_and_docs(words):
    """The examples name this command and its options, and the named docs exist."""
    command = COMMANDS[words]
    lines = Text.from_markup(command.epilog).plain.splitlines()
    assert lines[0] == "Examples"
    examples = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert examples
    for example in examples:
        called = shlex.split(example)
        assert called[: len(words) + 1] == ["retrace", *words]
        known = {option for one in COMMANDS.values() for p in one.params for option in p.opts}
        assert {word for word in called if word.startswith("--")} <= known
    assert lines[-2].startswith("Exit codes 0: ")
    pages = re.findall(r"[\w/-]+\.md", lines[-1].removeprefix("Docs "))
    assert pages
    assert [page for page in pages if not (ROOT / page).is_file()] == []


@pytest.mark.parametrize("group", [words for words in COMMANDS if len(words) == 1], ids=" ".join)
def test_the_help_of_a_group_lists_every_exit_code_of_its_commands(group):
    codes = {words: set(re.findall(r"\b(\d+): ", of.epilog)) for words, of in COMMANDS.items()}
    below = [found for words, found in codes.items() if words[:1] == group]
    assert codes[group] == set().union(*below)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_h_is_help(words):
    short, long = (CliRunner().invoke(_app, [*words, option]) for option in ("-h", "--help"))
    assert (short.exit_code, long.exit_code) == (0, 0)
    assert short.output == long.output
    assert "Examples" in short.output


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_shows_no_python_types(words):
    """After an option, the help shows a placeholder such as N, not <list[int]>."""
    text = CliRunner(env={"COLUMNS": "200"}).invoke(_app, [*words, "--help"]).output
    options = [line for line in text.splitlines() if re.search(r"│[ *]+--", line)]
    assert options
    assert [line for line in options if re.search(r"<(int|str|path|list)\b", line)] == []


def test_version_is_printed():
    result = CliRunner().invoke(_app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"retrace {retrace.__version__}\n")


def test_completion_is_offered():
    done = CliRunner().invoke(
        _app,
        [],
        prog_name="retrace",
        env={
            "_RETRACE_COMPLETE": "complete_bash",
            "COMP_WORDS": "retrace tra",
            "COMP_CWORD": "1",
        },
    )
    assert done.output.split() == ["traces"]
