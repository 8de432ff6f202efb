"""The last part of each `--help` (examples, exit codes, documentation), and groups of commands."""

import typer
from rich.markup import escape


def epilog(page: str, codes: str, *examples: str) -> str:
    """Return the last part of a command's help.

    Args:
        page: Pages of the repository, such as docs/commands.md.
        codes: Exit codes with their meanings.
        examples: Command lines that call the command.
    """
    lines = [
        "[bold]Examples[/bold]",
        *(f"[dim]$[/dim] {escape(example)}" for example in examples),
        f"[bold]Exit codes[/bold] {escape(codes)}",
        f"[bold]Docs[/bold] {escape(page)}",
    ]
    return "\n".join(lines)


def command_group(help: str, end: str, short_help: str | None = None) -> typer.Typer:
    """Return a group of commands, such as `retrace traces`.

    Args:
        help: The description of the group.
        end: The last part of the help (`epilog`).
        short_help: The description in the list of all commands; None to use `help`.
    """
    return typer.Typer(
        help=help,
        short_help=short_help,
        epilog=end,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
    )


LOOKED = "0: done; 2: the run, step or sample does not exist, or cannot be read"
"""Exit codes of the commands that only read."""
LOOKED_AT_STEPS = "0: done; 1: done except for damaged parts, one line each; " + LOOKED[9:]
"""Exit codes of the commands that read several steps or runs."""
