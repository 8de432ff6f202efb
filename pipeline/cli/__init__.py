"""The `retrace` command: run, check, traces."""

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import traces
from pipeline.cli.check import run_check
from pipeline.cli.run import run_run

_app = typer.Typer(
    name="retrace",
    help="Record and replay MoE routing between vLLM rollouts and Megatron training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
_app.add_typer(traces.app, name="traces")

_Config = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Settings of the run.")]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings that replace those of the file."),
]


@_app.command()
def run(config: _Config, overrides: _Overrides = None) -> None:
    """Run, or attach to, the run that CONFIG.yaml describes.

    Exit code 0: finished; 1: failed; 2: the input is wrong and nothing was started.
    """
    raise typer.Exit(run_run(config, overrides or []))


@_app.command()
def check(config: _Config, overrides: _Overrides = None) -> None:
    """Check CONFIG.yaml and everything it names; start nothing.

    Exit code 0: a run may start; 2: the errors, all of them.
    """
    raise typer.Exit(run_check(config, overrides or []))


def main() -> None:
    """Entry point of the `retrace` script."""
    _app()
