"""The `retrace` command and its subcommands."""

from typing import Annotated

import typer

from pipeline import __version__
from pipeline.cli import checkpoints, policies, traces, whole_runs
from pipeline.cli.check import check
from pipeline.cli.doctor import doctor
from pipeline.cli.epilog import epilog
from pipeline.cli.import_verl import import_verl
from pipeline.cli.logs import logs
from pipeline.cli.run import run
from pipeline.store.schemes import EXAMPLE_STORE

_app = typer.Typer(
    name="retrace",
    help="Record and replay MoE routing between vLLM rollouts and Megatron training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=epilog(
        "docs/commands.md (start with README.md)",
        "0: done; 2: invalid input; for other codes, see the help of each command",
        "retrace check my.yaml",
        "retrace run my.yaml trainer.total_training_steps=200",
        "retrace traces ls outputs/store/quickstart",
    ),
)
_app.add_typer(whole_runs.app, name="runs")
_app.add_typer(policies.app, name="policies")
_app.add_typer(checkpoints.app, name="checkpoints")
_app.add_typer(traces.app, name="traces")

# An option from verl's command line is passed on as an override. The settings reader refuses it
# with a message that gives the fix.
_VERL_OPTIONS = {"ignore_unknown_options": True}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"retrace {__version__}")
        raise typer.Exit


@_app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Handle the options that precede a command."""


_app.command(
    "run",
    context_settings=_VERL_OPTIONS,
    epilog=epilog(
        "docs/config.md (every setting), README.md",
        "0: finished; 1: failed; 2: invalid input, and nothing was started; "
        "130: ended by Ctrl-C; 143: by SIGTERM",
        "retrace run examples/quickstart.yaml",
        "retrace run my.yaml trainer.experiment_name=second trainer.total_training_steps=200",
        "retrace run my.yaml trainer.experiment_name=r2 "
        'actor_rollout_ref.actor.router_replay.mode="R2"',
    ),
)(run)

_app.command(
    "check",
    context_settings=_VERL_OPTIONS,
    epilog=epilog(
        "docs/config.md",
        "0: the run can start; 2: it cannot, and every error was printed",
        "retrace check examples/quickstart.yaml",
        "retrace check my.yaml data.train_batch_size=64",
        "retrace check my.yaml --gpu-memory 80GiB",
    ),
)(check)

_app.command(
    "import-verl",
    epilog=epilog(
        "docs/from-verl.md",
        "0: the file was written; 2: it was not, and every error was printed",
        "retrace import-verl run_qwen3_30b.sh -o my.yaml",
        "retrace import-verl run_qwen3_30b.sh -o my.yaml trainer.nnodes=2",
        "retrace import-verl configs/my_ppo.yaml -o my.yaml trainer.nnodes=2",
    ),
)(import_verl)

_app.command(
    "doctor",
    epilog=epilog(
        "docs/commands.md",
        "0: nothing is broken; 1: something is broken; 2: the settings are invalid",
        "retrace doctor",
        "retrace doctor examples/quickstart.yaml",
        "retrace doctor my.yaml trainer.device=cuda",
        f"retrace doctor {EXAMPLE_STORE}",
    ),
)(doctor)

_app.command(
    "logs",
    epilog=epilog(
        "docs/commands.md",
        "0: done; 2: this machine has no logs of the run; 130: ended by Ctrl-C",
        "retrace logs quickstart",
        "retrace logs my.yaml --worker training-0 -f",
        "retrace logs outputs/store/quickstart -n 500",
    ),
)(logs)


def main() -> None:
    """Entry point of the `retrace` script."""
    _app()
