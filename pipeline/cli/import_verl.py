"""`retrace import-verl`: convert a verl job to a settings file."""

from collections.abc import Sequence
from pathlib import Path

import retrace
from pipeline.cli.check import error_console, print_errors


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
            problem = f"{target}: this file already exists; remove it, or give a different name"
            raise retrace.InputError([problem])
        if not target.parent.is_dir():
            problem = f"{target}: the folder {target.parent} does not exist"
            raise retrace.InputError([f"{problem}; create it, or give a different one"])
        text = retrace.import_verl(source, arguments)
    except retrace.InputError as error:
        print_errors(error)
        return 2
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"{target}: this file cannot be written: {error.strerror}; give a different file"
        print_errors(retrace.InputError([problem]))
        return 2
    # Imported here so that other commands do not load pydantic.
    from pipeline.config.reading.undecided import TODO

    todos = sum(line.lstrip().startswith(TODO) for line in text.splitlines())
    first = f"resolve its {todos} TODO lines, then " if todos else ""
    error_console().print(f"wrote {target}; {first}run: retrace check {target}", markup=False)
    return 0
