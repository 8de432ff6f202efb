"""`retrace import-verl`: a verl job as a settings file."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import retrace
from pipeline.cli.check import print_errors


def run_import_verl(source: Path, target: Path, arguments: Sequence[str]) -> int:
    """Write the settings file of a verl job; the exit code of the command."""
    try:
        if target.exists():
            raise retrace.InputError(
                [f"{target}: this file is there already; remove it, or name another one"]
            )
        if not target.parent.is_dir():
            raise retrace.InputError(
                [f"{target}: the folder {target.parent} is not there; make it, or name another one"]
            )
        text = retrace.import_verl(source, arguments)
        _write(target, text)
    except retrace.InputError as error:
        print_errors(error)
        return 2
    from pipeline.config.reading.undecided import (
        TODO,  # with pydantic: not at every command's start
    )

    todos = sum(line.lstrip().startswith(TODO) for line in text.splitlines())
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    first = f"decide its {todos} TODO lines, then " if todos else ""
    console.print(f"{target} is written; {first}run: retrace check {target}", markup=False)
    return 0


def _write(target: Path, text: str) -> None:
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise retrace.InputError(
            [f"{target}: this file cannot be written: {error.strerror}; name another one"]
        ) from error
