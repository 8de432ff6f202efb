"""The `retrace` command: run, check, import-verl, doctor, logs, runs, traces."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pipeline import __version__
from pipeline.cli import traces, whole_runs
from pipeline.cli.check import run_check
from pipeline.cli.doctor import doctor
from pipeline.cli.ending import end_by_signals
from pipeline.cli.epilog import epilog
from pipeline.cli.import_verl import run_import_verl
from pipeline.cli.logs import logs
from pipeline.cli.run import run_run
from pipeline.store.schemes import EXAMPLE_STORE

_app = typer.Typer(
    name="retrace",
    help="Record and replay MoE routing between vLLM rollouts and Megatron training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=epilog(
        "docs/commands.md (README.md to begin with)",
        "0: done; 2: the input is wrong; others: see the command's own help",
        "retrace check my.yaml",
        "retrace run my.yaml trainer.total_training_steps=200",
        "retrace traces ls outputs/store/quickstart",
    ),
)
_app.add_typer(whole_runs.app, name="runs")
_app.add_typer(traces.app, name="traces")

# An option of verl's command line among the overrides is refused there, with what to do.
_VERL_OPTIONS = {"ignore_unknown_options": True}

_Config = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Settings of the run.")]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings that replace those of the file."),
]


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
    """Takes the options that stand before a command."""


@_app.command(
    context_settings=_VERL_OPTIONS,
    epilog=epilog(
        "docs/config.md (every setting), README.md",
        "0: finished; 1: failed; 2: the input is wrong and nothing was started; "
        "130: ended by Ctrl-C; 143: by SIGTERM",
        "retrace run examples/quickstart.yaml",
        "retrace run my.yaml trainer.experiment_name=second trainer.total_training_steps=200",
        "retrace run my.yaml trainer.experiment_name=r2 "
        'actor_rollout_ref.actor.router_replay.mode="R2"',
    ),
)
def run(config: _Config, overrides: _Overrides = None) -> None:
    """Run, or attach to, the run that CONFIG.yaml describes.

    A run of that name which was interrupted goes on; one that is finished is left as it is.
    """
    raise typer.Exit(end_by_signals(partial(run_run, config, overrides or [])))


@_app.command(
    context_settings=_VERL_OPTIONS,
    epilog=epilog(
        "docs/config.md",
        "0: a run may start; 2: it may not, and every error was printed",
        "retrace check examples/quickstart.yaml",
        "retrace check my.yaml data.train_batch_size=64",
        "retrace check my.yaml --gpu-memory 80GiB",
    ),
)
def check(
    config: _Config,
    overrides: _Overrides = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Refuse what does not fit into GPUs of this size (80GiB, 80GB) by estimate.",
        ),
    ] = None,
) -> None:
    """Check CONFIG.yaml and everything it names; start nothing.

    Settings, model, prompts, reward function and store are checked, and all errors are shown. How
    much memory the run needs is estimated (docs/sizes.md).
    """
    raise typer.Exit(run_check(config, overrides or [], gpu_memory))


@_app.command(
    "import-verl",
    epilog=epilog(
        "docs/from-verl.md",
        "0: the file is written; 2: it is not, and every error was printed",
        "retrace import-verl run_qwen3_30b.sh -o my.yaml",
        "retrace import-verl run_qwen3_30b.sh -o my.yaml trainer.nnodes=2",
        "retrace import-verl configs/my_ppo.yaml -o my.yaml trainer.nnodes=2",
    ),
)
def import_verl(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A shell script that starts verl.trainer.main_ppo, a YAML file for verl, or the "
            "folder of --config-name.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="MY.yaml", help="The file to write.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VERL_ARGUMENT]...", help="Further arguments of verl."),
    ] = None,
) -> None:
    """Write the settings file of a verl job, with a TODO for each key that you must decide.

    bash evaluates a script, but starts no program and writes no file. YAML with defaults or ${...}
    needs the extra `verl`.
    """
    raise typer.Exit(run_import_verl(source, output, arguments or []))


_app.command(
    "doctor",
    epilog=epilog(
        "docs/commands.md",
        "0: nothing is broken; 1: something is; 2: the settings are wrong",
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
        "0: done; 2: no logs are here; 130: ended by Ctrl-C",
        "retrace logs quickstart",
        "retrace logs my.yaml --worker training-0 -f",
        "retrace logs outputs/store/quickstart -n 500",
    ),
)(logs)


def main() -> None:
    """Entry point of the `retrace` script."""
    _app()
