"""`retrace checkpoints`: list the checkpoints of a run."""

from collections.abc import Callable, Mapping

from rich.filesize import decimal

from pipeline.cli.epilog import command_group, epilog
from pipeline.cli.printable import listing
from pipeline.cli.runs import Run, end_with, open_run, print_table, refusing
from pipeline.store.schemes import EXAMPLE_STORE
from pipeline.upkeep.checkpoint_list import ListedCheckpoint

app = command_group(
    "List the checkpoints of a run. A checkpoint loads directly into other TP, PP, CP and DP "
    "sizes, so there is no command to convert one.",
    epilog(
        "docs/commands.md, docs/trace-format.md",
        "0: done; 1: a checkpoint cannot be loaded; 2: no run was found",
        "retrace checkpoints ls quickstart",
    ),
    short_help="List the checkpoints of a run.",
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
        "docs/commands.md",
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
    columns: dict[str, Callable[[ListedCheckpoint], str]] = {
        "policy": lambda one: str(one.version),
        "size": lambda one: decimal(one.size),
        "saved by": lambda one: _layout(one.layout),
        "continues at": lambda one: (
            f"step {one.version}" if one.restarts else "— (its step is unfinished)"
        ),
    }
    print_table(listing(found, columns, left=("saved by", "continues at")))
    end_with(f"checkpoint of policy {one.version}: {one.problem}" for one in found if one.problem)


def _layout(layout: Mapping[str, object]) -> str:
    """Return the parallel sizes above 1 as text. Example: 'TP2 EP8 DP4'."""
    sizes = [f"{short}{layout[name]}" for name, short in _SIZES.items() if layout.get(name, 1) != 1]
    return " ".join(sizes) or "1 rank"
