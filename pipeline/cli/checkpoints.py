"""`retrace checkpoints`: list the checkpoints of a run."""

from collections.abc import Mapping

import typer
from rich.filesize import decimal

from pipeline.cli.epilog import epilog
from pipeline.cli.printable import StoredTable
from pipeline.cli.runs import DAMAGED, Run, open_run, print_, print_line, refusing
from pipeline.store.schemes import EXAMPLE_STORE

app = typer.Typer(
    help="List the checkpoints of a run. A checkpoint loads directly into other TP, PP, CP and DP "
    "sizes, so there is no command to convert one.",
    short_help="List the checkpoints of a run.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    epilog=epilog(
        "docs/commands.md, docs/run-folder.md",
        "0: done; 1: a checkpoint cannot be loaded; 2: no run was found",
        "retrace checkpoints ls quickstart",
    ),
)

_SIZES = {
    "tensor": "TP",
    "pipeline": "PP",
    "virtual_pipeline": "VPP",
    "context": "CP",
    "expert": "EP",
    "data": "DP",
}


@app.callback()
def _group() -> None:
    """List the checkpoints of a run."""


@app.command(
    "ls",
    epilog=epilog(
        "docs/run-folder.md",
        "0: done; 1: a checkpoint cannot be loaded; 2: no run was found",
        "retrace checkpoints ls quickstart",
        f"retrace checkpoints ls {EXAMPLE_STORE}/first",
    ),
)
def list_(run: Run) -> None:
    """List the stored checkpoints of a run: size, and the parallel layout that saved each of them.

    They can be loaded in a different layout: retrace run with different sizes continues from the
    newest checkpoint. This command reads only commits.
    """
    with refusing():
        found = open_run(run, sealed=False).listed_checkpoints()
    table = StoredTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("policy", "size", "saved by", "continues at"):
        right = column in ("policy", "size")
        table.add_column(column, justify="right" if right else "left")
    for checkpoint in found:
        table.add_row(
            str(checkpoint.version),
            decimal(checkpoint.size),
            _layout(checkpoint.layout),
            f"step {checkpoint.version}" if checkpoint.restarts else "— (its step is unfinished)",
        )
    print_(table)
    broken = [checkpoint for checkpoint in found if checkpoint.problem]
    for checkpoint in broken:
        print_line(f"checkpoint of policy {checkpoint.version}: {checkpoint.problem}")
    if broken:
        raise typer.Exit(DAMAGED)


def _layout(layout: Mapping[str, object]) -> str:
    """Return the parallel sizes above 1 as text. Example: 'TP2 EP8 DP4'."""
    sizes = [f"{short}{layout[name]}" for name, short in _SIZES.items() if layout.get(name, 1) != 1]
    return " ".join(sizes) or "1 rank"
