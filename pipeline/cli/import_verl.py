"""`retrace import-verl`: convert a verl job to a settings file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import retrace
from pipeline.cli.check import error_console, print_errors


def import_verl(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A shell script that starts verl.trainer.main_ppo, a YAML file for verl, or the "
            "folder that contains the file of --config-name.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="MY.yaml", help="The file to write.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VERL_ARGUMENT]...", help="Additional verl arguments."),
    ] = None,
) -> None:
    """Write the settings file for a verl job, with a TODO for each key that you must decide.

    If SOURCE is a script, bash evaluates it without starting a program or writing a file. YAML with
    defaults or ${...} requires the extra `verl`.
    """
    target = output.expanduser()
    try:
        text = _written(source.expanduser(), target, arguments or [])
    except retrace.InputError as error:
        print_errors(error)
        raise typer.Exit(2) from error
    # Imported here so that other commands do not load pydantic.
    from pipeline.config.reading.undecided import TODO

    todos = sum(line.lstrip().startswith(TODO) for line in text.splitlines())
    first = f"resolve its {todos} TODO lines, then " if todos else ""
    error_console().print(f"wrote {target}; {first}run: retrace check {target}", markup=False)


def _written(source: Path, target: Path, arguments: Sequence[str]) -> str:
    """Write the settings file, which must not exist, and return its text. Raises InputError."""
    if target.exists():
        problem = f"{target}: this file already exists; remove it, or give a different name"
        raise retrace.InputError([problem])
    if not target.parent.is_dir():
        problem = f"{target}: the folder {target.parent} does not exist"
        raise retrace.InputError([f"{problem}; create it, or give a different one"])
    text = retrace.import_verl(source, arguments)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"{target}: this file cannot be written: {error.strerror}; give a different file"
        raise retrace.InputError([problem]) from error
    return text
