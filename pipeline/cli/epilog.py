"""What every `--help` ends with: examples, exit codes, and the page of the docs."""

from rich.markup import escape


def epilog(page: str, codes: str, *examples: str) -> str:
    """The end of a command's help. `page` names files of the repository."""
    lines = [
        "[bold]Examples[/bold]",
        *(f"[dim]$[/dim] {escape(example)}" for example in examples),
        f"[bold]Exit codes[/bold] {escape(codes)}",
        f"[bold]Docs[/bold] {escape(page)}",
    ]
    return "\n".join(lines)


LOOKED = "0: done; 2: what was asked for is not there, or cannot be read"
"""Exit codes of the commands that only look."""
LOOKED_AT_STEPS = "0: done; 1: done, but for what is damaged, each a line; " + LOOKED[9:]
"""The same, where several steps or runs are looked at."""
