"""`retrace import-verl`: convert a verl job to a settings file."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import retrace
from pipeline.cli.check import print_errors


def run_import_verl(source: Path, target: Path, arguments: Sequence[str]) -> int:
    """Write the settings file for a verl job, and return the exit code of the command.

    Args:
        source: A verl script, YAML file or folder.
        target: The file to write; it must not exist.
        arguments: Additional verl arguments.
    """
    source, target = source.expanduser(), target.expanduser()
    try:
        if target.exists():
            raise retrace.InputError(
                [f"{target}: this file already exists; remove it, or give a different name"]
            )
        if not target.parent.is_dir():
            raise retrace.InputError(
                [
                    f"{target}: the folder {target.parent} does not exist; create it, or give "
                    "a different one"
                ]
            )
        text = retrace.import_verl(source, arguments)
        _write(target, text)
    except retrace.InputError as error:
        print_errors(error)
        return 2
    from pipeline.config.reading.undecided import (
        TODO,  # imported here so that other commands do not load pydantic
    )

    todos = sum(line.lstrip().startswith(TODO) for line in text.splitlines())
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    first = f"resolve its {todos} TODO lines, then " if todos else ""
    console.print(f"wrote {target}; {first}run: retrace check {target}", markup=False)
    return 0


def _write(target: Path, text: str) -> None:
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise retrace.InputError(
            [f"{target}: this file cannot be written: {error.strerror}; give a different file"]
        ) from error
