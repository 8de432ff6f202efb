"""The last part of every command's `--help`: examples, exit codes and documentation pages."""

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


LOOKED = "0: done; 2: the run, step or sample does not exist, or cannot be read"
"""Exit codes of the commands that only read."""
LOOKED_AT_STEPS = "0: done; 1: done except for damaged parts, one line each; " + LOOKED[9:]
"""Exit codes of the commands that read several steps or runs."""
